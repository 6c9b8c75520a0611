"""Command that translates a correction between frameworks."""

from __future__ import annotations

import argparse
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ..analysis.whatif.compose import initialize_composer
from ..analysis.whatif.overrides import build_overrides
from ..correction import CorrectionSpec, SpecError
from ..correction.dialects.trl import TRL_DEFAULTS

BAD_INPUT: Final = 2
"""Exit status."""
_LOSS_MODE: Final = "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"


def find_section(document: Mapping[str, Any], *path: str) -> Any:
    """Find the section at ``path``, nested or as one dotted key; the document itself where it is not there.

    Example:
        >>> find_section({"actor": {"lr": 1}}, "actor"), find_section({"lr": 1}, "actor")
        ({'lr': 1}, {'lr': 1})
    """
    node: Any = document
    for name in path:
        if not isinstance(node, Mapping) or name not in node:
            return document
        node = node[name]
    return node


def _read_areal(document: Mapping[str, Any]) -> CorrectionSpec:
    return CorrectionSpec.from_areal(find_section(document, "actor"))


def _read_nemo_rl(document: Mapping[str, Any]) -> CorrectionSpec:
    grpo = document.get("grpo")
    threshold = grpo.get("seq_logprob_error_threshold") if isinstance(grpo, Mapping) else None
    return CorrectionSpec.from_nemo_rl(find_section(document, "loss_fn"), threshold)


def _read_slime(document: Mapping[str, Any]) -> CorrectionSpec:
    return CorrectionSpec.from_slime({str(key).lstrip("-").replace("-", "_"): document[key] for key in document})


def _read_openrlhf(document: Mapping[str, Any]) -> CorrectionSpec:
    prefix, nested = "algo.advantage.", find_section(document, "algo", "advantage")
    dotted = {key.removeprefix(prefix): value for key, value in document.items() if str(key).startswith(prefix)}
    kind = document.get("actor.policy_loss_type", find_section(document, "actor", "policy_loss_type"))
    return CorrectionSpec.from_openrlhf(dotted or nested, kind if isinstance(kind, str) else "ppo")


def _read_prime_rl(document: Mapping[str, Any]) -> CorrectionSpec:
    trainer = find_section(document, "trainer")
    return CorrectionSpec.from_prime_rl(find_section(trainer, "loss"))


def _read_trl(document: Mapping[str, Any]) -> CorrectionSpec:
    return CorrectionSpec.from_trl({key: document[key] for key in TRL_DEFAULTS if key in document})


_READERS: Final[dict[str, Callable[[Mapping[str, Any]], CorrectionSpec]]] = {
    "areal": _read_areal,
    "miles": _read_slime,
    "nemo_rl": _read_nemo_rl,
    "open_instruct": CorrectionSpec.from_open_instruct,
    "openrlhf": _read_openrlhf,
    "prime_rl": _read_prime_rl,
    "roll": CorrectionSpec.from_roll,
    "skyrl": lambda document: CorrectionSpec.from_skyrl(
        find_section(document, "trainer", "algorithm", "off_policy_correction")
    ),
    "slime": _read_slime,
    "trl": _read_trl,
    "verl": lambda document: CorrectionSpec.from_verl(find_section(document, "algorithm", "rollout_correction")),
}
_WRITERS: Final[dict[str, Callable[[CorrectionSpec], dict[str, Any]]]] = {
    "skyrl": CorrectionSpec.to_skyrl,
    "trl": CorrectionSpec.to_trl,
    "verl": CorrectionSpec.to_verl,
}


def read_document(path: Path) -> Mapping[str, Any]:
    """Read a configuration in TOML, by its name, or in YAML.

    Raises:
        ValueError: it holds no mapping, or cannot be parsed.
    """
    text = path.read_text()
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: expected a mapping of keys, as a framework's configuration is.")
    return document


def translate(document: Mapping[str, Any], source: str, target: str) -> str:
    """Translate the correction of ``document`` from one framework's keys to another's, as text.

    Raises:
        SpecError: it is malformed, or cannot be said there.

    Example:
        >>> print(translate({"is_correction_enable": True, "is_correction_type": "icepop"}, "openrlhf", "verl"))
        rollout_is: token
        rollout_is_threshold: 0.5_5.0
    """
    spec = _READERS[source](document)
    if target != "hydra":
        values = _WRITERS[target](spec)
        return yaml.safe_dump(values, sort_keys=False).strip() if values else "{}"
    with initialize_composer():
        overrides = build_overrides(spec)
    return "\n".join(shlex.quote(override) for override in [*overrides, *([_LOSS_MODE] if _needs_gpg(spec) else [])])


def _needs_gpg(spec: CorrectionSpec) -> bool:
    """Return True for a policy term without a ratio of the base loss's own: a weight on pi / mu, or Kimi k1.5's."""
    return spec.weighs_full_ratio or (spec.proximal == "bypass" and spec.penalty is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipe.offpolicy.translate")
    parser.add_argument("config", type=Path)
    parser.add_argument("--from", dest="source", required=True, choices=sorted(_READERS))
    parser.add_argument("--to", dest="target", default="hydra", choices=["hydra", *sorted(_WRITERS)])
    options = parser.parse_args(arguments)
    try:
        print(translate(read_document(options.config), options.source, options.target))  # noqa: T201
    except (SpecError, ValueError, OSError) as error:
        print(f"translate: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    return 0
