"""Command that translates a correction between frameworks."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ..analysis.whatif.candidates import build_overrides, initialize_composer
from ..correction import CorrectionSpec, SpecError
from ..correction.dialects import PEERS
from ..correction.dialects.peer import flatten
from ..correction.dialects.verl import VERL_DEFAULTS
from ..correction.problem import format_value, set_to

BAD_INPUT: Final = 2
"""Exit status."""
_SECTIONS: Final = ("rollout_correction", "algorithm.rollout_correction")
_LOSS_MODE: Final = "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"

_WRITERS: Final[dict[str, Callable[[CorrectionSpec], dict[str, Any]]]] = {
    "skyrl": CorrectionSpec.to_skyrl,
    "trl": CorrectionSpec.to_trl,
    "verl": CorrectionSpec.to_verl,
}


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: 1e-4 is a number, and a duplicate key causes an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_document(path: Path) -> Mapping[str, Any]:
    """Read a configuration, as TOML if the file's name indicates it, otherwise as YAML.

    Raises:
        ValueError: the file does not contain a mapping, or cannot be parsed.
    """
    import tomllib  # imported here because linters for Python 3.10, which lacks it, sort it differently

    try:
        text = path.read_text()
        document = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: expected a mapping of keys, like a framework's configuration.")
    return document


def translate(document: Mapping[str, Any], source: str, target: str) -> str:
    """Translate the correction of ``document`` from one framework's keys to another's, as text.

    Overrides are for verl's own programs. Overrides translated from verl also switch verl's own correction off.

    Raises:
        SpecError: the correction is malformed, or the target cannot express it.

    Example:
        >>> print(translate({"is_correction_level": "token"}, "openrlhf", "verl"))
        rollout_is: token
        rollout_is_threshold: 0.5_5.0
    """
    overrides = _switch_verls_off(document) if source == "verl" else []
    return _write(CorrectionSpec.from_peer(source, document), target, overrides)


def _write(spec: CorrectionSpec, target: str, more: Sequence[str]) -> str:
    """Return a correction as text, in a framework's keys or as overrides of a launch followed by ``more``."""
    if target != "hydra":
        values = _WRITERS[target](spec)
        return yaml.safe_dump(values, sort_keys=False).strip() if values else "{}"
    with initialize_composer():
        choice, *keys = build_overrides(spec)
    overrides = [f"+correction@{choice}", *keys, *([_LOSS_MODE] if _needs_gpg(spec) else []), *more]
    return "\n".join(map(shlex.quote, overrides))


def _switch_verls_off(document: Mapping[str, Any]) -> list[str]:
    """Build the overrides that set verl's own correction back to its defaults, for the keys that differ."""
    given = {}
    for path, value in flatten(document, "verl").items():
        section, _, key = path.rpartition(".")
        if section in ("", *_SECTIONS) and key in VERL_DEFAULTS:
            given[key] = value
    return [
        set_to(f"{_SECTIONS[-1]}.{key}", default)
        for key, default in VERL_DEFAULTS.items()
        if given.get(key) not in (None, default)
    ]


def _needs_gpg(spec: CorrectionSpec) -> bool:
    """Return True for a policy term that ignores the base loss's ratio: a weight on pi / mu, or Kimi k1.5's term."""
    return spec.weighs_full_ratio or (spec.proximal == "bypass" and spec.penalty is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    peer = PEERS[options.source]
    try:
        document = read_document(options.config)
        reading = peer.read_source(document, frozenset(options.ignore))
        more = _switch_verls_off(document) if options.source == "verl" else []
        print(_write(CorrectionSpec.from_mapping(reading.plain), options.target, more))  # noqa: T201
    except (SpecError, ValueError, OSError) as error:
        print(f"translate: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    idle = [f"{key}={format_value(value)}" for key, value in sorted(reading.idle.items())]
    for what, keys in (
        ("not part of a correction, so not translated", sorted(reading.ignored)),
        ("removing any of these does not change the translation", idle),
    ):
        if keys:
            print(f"translate: {what}: {', '.join(keys)}", file=sys.stderr)  # noqa: T201
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=os.environ.get("OFFPOLICY_PROGRAM", "python -m recipe.offpolicy.translate"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--from", dest="source", required=True, choices=sorted(PEERS))
    parser.add_argument("--to", dest="target", default="hydra", choices=["hydra", *sorted(_WRITERS)])
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="KEY", help="ignore this key, which corrects nothing"
    )
    return parser
