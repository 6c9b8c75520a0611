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

from ..analysis.whatif.compose import initialize_composer
from ..analysis.whatif.overrides import build_overrides
from ..correction import CorrectionSpec, SpecError
from ..correction.dialects import PEERS
from ..correction.problem import format_value

BAD_INPUT: Final = 2
"""Exit status."""
_LOSS_MODE: Final = "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"

_WRITERS: Final[dict[str, Callable[[CorrectionSpec], dict[str, Any]]]] = {
    "skyrl": CorrectionSpec.to_skyrl,
    "trl": CorrectionSpec.to_trl,
    "verl": CorrectionSpec.to_verl,
}


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf reads it: 1e-4 is a number, and a duplicate key is an error."""

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
    """Read a configuration in TOML, by its file name, or in YAML.

    Raises:
        ValueError: it holds no mapping, or cannot be parsed.
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

    Raises:
        SpecError: it is malformed, or the target cannot express it.

    Example:
        >>> print(translate({"is_correction_level": "token"}, "openrlhf", "verl"))
        rollout_is: token
        rollout_is_threshold: 0.5_5.0
    """
    return _write(CorrectionSpec.from_peer(source, document), target)


def _write(spec: CorrectionSpec, target: str) -> str:
    """Write a correction in a framework's keys, or as overrides of a launch, as text."""
    if target != "hydra":
        values = _WRITERS[target](spec)
        return yaml.safe_dump(values, sort_keys=False).strip() if values else "{}"
    with initialize_composer():
        overrides = build_overrides(spec)
    return "\n".join(shlex.quote(override) for override in [*overrides, *([_LOSS_MODE] if _needs_gpg(spec) else [])])


def _needs_gpg(spec: CorrectionSpec) -> bool:
    """Return True for a policy term that ignores the base loss's ratio: a weight on pi / mu, or Kimi k1.5's."""
    return spec.weighs_full_ratio or (spec.proximal == "bypass" and spec.penalty is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    peer = PEERS[options.source]
    try:
        reading = peer.read_source(read_document(options.config), frozenset(options.ignore))
        print(_write(CorrectionSpec.from_mapping(reading.plain), options.target))  # noqa: T201
    except (SpecError, ValueError, OSError) as error:
        print(f"translate: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    idle = [f"{key}={format_value(value)}" for key, value in sorted(reading.idle.items())]
    for what, keys in (
        ("no correction, so not translated", sorted(reading.ignored)),
        ("without any of these the translation is the same", idle),
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
    parser.add_argument("--ignore", action="append", default=[], metavar="KEY", help="a key that corrects nothing")
    return parser
