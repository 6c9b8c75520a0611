"""Facts read from a model's files without loading it: experts, dropout, and the size of the largest tensor."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MODEL = "actor_rollout_ref.model"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\..*")
_NOISE = ("dropout", "pdrop", "drop_path", "drop_rate", "layerdrop", "jitter", "noise")
_HEADS = ("classifier", "summary")  # model heads that verl's actor does not train


def find_experts(config: DictConfig) -> tuple[bool, str] | None:
    """Find out whether the actor is a mixture of experts, without loading it and without a network.

    Returns:
        Whether the actor is a mixture of experts, and a sentence that names the file with the evidence; None if this
        machine has no ``config.json``.
    """
    for name in (OmegaConf.select(config, f"{_MODEL}.{key}") for key in ("hf_config_path", "path")):
        if not isinstance(name, str) or (file := find_local(name)) is None:
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        found = next(_find_expert_counts(values), None)
        return found is not None, f"{file} {f'has {found[0]}={found[1]}' if found else 'specifies no experts'}"
    return None


def _find_expert_counts(values: Any) -> Iterator[tuple[str, int]]:
    """Find keys, at any depth, that set more than one expert: num_experts, num_local_experts, n_routed_experts ..."""
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        counts = value if isinstance(value, list) else [value]
        most = max((each for each in counts if isinstance(each, int) and not isinstance(each, bool)), default=0)
        if "experts" in str(key) and most > 1:
            yield str(key), most
        yield from _find_expert_counts(value)


def find_local(name: str) -> Path | None:
    """Find the ``config.json`` of a model in a local folder, or in the hub's cache on this machine."""
    folder = Path(os.path.expanduser(name))
    if (folder / CONFIG).is_file():
        return folder / CONFIG
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:  # a path that does not exist
        return None
    return Path(cached) if isinstance(cached, str) else None


def describe_noise(config: DictConfig) -> str:
    """Explain why the actor's model may compute differently in training and evaluation mode; empty if it cannot.

    Reads the model's Hugging Face configuration from this machine or its cache, never from the network, and applies
    verl's ``override_config``.
    """
    for key in ("external_lib", "lora_adapter_path"):
        if (value := OmegaConf.select(config, f"{_MODEL}.{key}")) is not None:
            return f"{_MODEL}.{key}={value} may change the model"
    if OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.qat.enable"):
        return "training is quantisation-aware"
    path = OmegaConf.select(config, f"{_MODEL}.hf_config_path") or OmegaConf.select(config, f"{_MODEL}.path")
    values = _read_values(str(path))
    if values is None:
        return f"the configuration of {path}, which says whether the model has dropout, is not on this machine"
    if "auto_map" in values and OmegaConf.select(config, f"{_MODEL}.trust_remote_code"):
        return f"{path} has its own code"
    node = OmegaConf.select(config, f"{_MODEL}.override_config")
    given: Any = {} if node is None else OmegaConf.to_container(node, resolve=True)
    found = next(find_noise(_merge(values, given.get("model_config", given))), None)
    return "" if found is None else f"the model has {found[0]}={found[1]:g} in training"


def find_noise(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Find a setting that makes a forward pass random, such as ``attention_dropout``; return name and value."""
    for key, value in values.items():
        name = str(key)  # class labels are numbers
        here = f"{path}{name}"
        if isinstance(value, Mapping):
            yield from find_noise(value, f"{here}.")
        elif any(word in name.lower() for word in _NOISE) and not name.startswith(_HEADS):
            # Some configurations store numbers as text.
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
        # Whether remote code is trusted is not asked here, because the prompt would block until it is answered.
        found = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    values: dict[str, Any] = found.to_dict()
    return values


def count_largest_tensor(folder: Path, *, stacked: bool = False) -> int | None:
    """Count the elements of the largest tensor of a model.

    Args:
        folder: folder with ``config.json`` and, if available, safetensors or PyTorch files, sharded or not.
        stacked: whether to count the experts of one layer as one tensor, which is at least as large as transformers'
            stacked tensors.

    Returns:
        The number of elements; if no weight file can be read, the size of the embedding, vocab_size x hidden_size; None
        if the configuration lacks these values too.
    """
    counts: dict[str, int] = {}
    for file in list_weights(folder):
        try:
            shapes = read_shapes(file)
        except ValueError:
            continue
        for name, shape in shapes.items():
            expert = _EXPERT.fullmatch(name) if stacked else None
            name = expert[1] if expert else name
            counts[name] = counts.get(name, 0) * bool(expert) + math.prod(shape)
    return max(counts.values(), default=None) or _count_embedding(folder)


def list_weights(folder: Path) -> list[Path]:
    """List the weight files in a folder, by name."""
    return sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))


def read_shapes(file: Path) -> dict[str, list[int]]:
    """Read the name and shape of each tensor in a safetensors or PyTorch file, without its data.

    Raises:
        ValueError: the file is cut off or damaged.
    """
    try:
        return _read_header(file) if file.suffix == ".safetensors" else _read_pickled(file)
    except Exception as error:  # pickle, zip and JSON raise their own errors
        raise ValueError(f"{file.name} is damaged or cut off") from error


def _read_header(file: Path) -> dict[str, list[int]]:
    """Read the header of a safetensors file: 8 bytes with the length of the JSON, the JSON, and then the data."""
    whole = file.stat().st_size
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > whole:
            raise ValueError
        entries = {name: entry for name, entry in json.loads(opened.read(size)).items() if name != "__metadata__"}
    if max((entry["data_offsets"][1] for entry in entries.values()), default=0) + size + 8 > whole:
        raise ValueError
    return {name: entry["shape"] for name, entry in entries.items()}


def _read_pickled(file: Path) -> dict[str, list[int]]:
    """Read a PyTorch file; only tensors are loaded, and their data are not read."""
    import torch

    saved = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    return {name: list(tensor.shape) for name, tensor in saved.items() if isinstance(tensor, torch.Tensor)}


def count_vocabulary(folder: Path) -> int | None:
    """Count the tokens for which a model has logits; None if its ``config.json`` does not contain this number."""
    return max((sizes[0] for sizes in _list_sizes(folder, "vocab_size")), default=None)


def _count_embedding(folder: Path) -> int | None:
    return max(map(math.prod, _list_sizes(folder, "vocab_size", "hidden_size")), default=None)


def _list_sizes(folder: Path, *names: str) -> list[list[int]]:
    """List the values of the keys ``names`` in each section of ``config.json`` that contains all of these keys."""
    try:
        values: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    sections = [values, *values.values()] if isinstance(values, Mapping) else []
    found: list[list[Any]] = [[each.get(name) for name in names] for each in sections if isinstance(each, Mapping)]
    return [sizes for sizes in found if all(isinstance(size, int) for size in sizes)]
