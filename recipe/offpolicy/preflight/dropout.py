"""Detection of models whose log-probs differ between training and evaluation mode, before they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

_MODEL = "actor_rollout_ref.model"
_NOISE = ("dropout", "pdrop", "drop_path", "drop_rate", "layerdrop", "jitter", "noise")
_HEADS = ("classifier", "summary")  # of models that verl's actor does not train


def describe_noise(config: DictConfig) -> str:
    """Return why the actor's model may compute otherwise in training than in evaluation; empty if it cannot.

    Reads the Hugging Face configuration of the model, on this machine or in its cache and never from the network, with
    verl's ``override_config`` over it.
    """
    for key in ("external_lib", "lora_adapter_path"):
        if (value := OmegaConf.select(config, f"{_MODEL}.{key}")) is not None:
            return f"{_MODEL}.{key}={value} may change the model"
    if OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.qat.enable"):
        return "training is aware of quantisation"
    path = OmegaConf.select(config, f"{_MODEL}.hf_config_path") or OmegaConf.select(config, f"{_MODEL}.path")
    values = _read_values(str(path))
    if values is None:
        return f"the configuration of {path} is not at hand, which would say whether the model has dropout"
    if "auto_map" in values and OmegaConf.select(config, f"{_MODEL}.trust_remote_code"):
        return f"{path} brings code of its own"
    node = OmegaConf.select(config, f"{_MODEL}.override_config")
    given: Any = {} if node is None else OmegaConf.to_container(node, resolve=True)
    found = next(find_noise(_merge(values, given.get("model_config", given))), None)
    return "" if found is None else f"the model has {found[0]}={found[1]:g} in training"


def find_noise(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Find what makes a forward pass random, such as ``text_config.attention_dropout``: dotted name and value."""
    for key, value in values.items():
        name = str(key)  # labels of classes have numbers
        here = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from find_noise(value, f"{here}.")
        elif any(word in name.lower() for word in _NOISE) and not name.startswith(_HEADS):
            # Some configurations hold numbers as text.
            try:
                number = float(value or 0)
            except (TypeError, ValueError):
                continue
            if number:
                yield here, number


def _merge(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in given.items():
        below = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[name] = _merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


@lru_cache(maxsize=8)
def _read_values(path: str) -> dict[str, Any] | None:
    """Read a model's configuration with the defaults of its class; None if it is not on this machine."""
    from transformers import AutoConfig

    try:
        # Never asks whether remote code is trusted: it would wait for an answer.
        found = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    values: dict[str, Any] = found.to_dict()
    return values
