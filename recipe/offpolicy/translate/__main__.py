"""Translate a correction from another framework's configuration into this package's, verl's, SkyRL's or TRL's.

    python -m recipe.offpolicy.translate --from areal config.yaml --to hydra
    python -m recipe.offpolicy.translate --from prime_rl trainer.toml --to verl

--from takes one of these frameworks; the supported keys are those of the given releases:

    areal 1.0.0 to 1.0.4             prime_rl 0.6.0 to 0.8.0
    miles 0.0.2 to 0.1.0             roll 0.2.0 to 0.3.0
    ms_swift 4.6.0                   skyrl 0.1.0 to 0.4.0
    nemo_rl 0.5.0 to 0.7.0           slime 0.2.4 to 0.3.1
    open_instruct 0.2.0 to 0.3.0     trl 0.28.0 to 1.16.0
    openrlhf 0.9.1 to 0.11.2         verl 0.7.0 to 0.9.1

The file contains the whole configuration, a section, or flat options, in YAML or TOML; a missing key has the default of
the newest of these releases. --to hydra prints overrides for verl's own programs; with --from verl, they also switch
verl's own correction off. In a fork, write correction= instead of +correction@correction=. The other targets are skyrl,
trl (from 1.6.0 on) and verl; they print that framework's section in YAML.

A correction that the target cannot express, or an unknown key that may belong to one, leads to an error that names the
key. Keys that belong to the loss, or merely resemble keys of a correction, are listed on standard error. --ignore KEY,
which may be repeated, declares that an unknown key is not part of a correction.

Exit status: 0, or 2 if a file or an argument is invalid, or something cannot be expressed.
"""

from __future__ import annotations

from ..process_start import answer_help

if __name__ == "__main__":
    answer_help(__doc__)

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ..analysis.whatif.candidates import build_overrides, initialize_composer
from ..command_line import name_program, refuse, run
from ..correction import CorrectionSpec, SpecError
from ..correction.dialects import PEERS
from ..correction.dialects.peer import flatten
from ..correction.dialects.verl import VERL_DEFAULTS
from ..correction.problem import format_value, set_to

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


def translate(
    document: Mapping[str, Any], source: str, target: str, ignored: Collection[str] = ()
) -> tuple[str, list[str]]:
    """Translate the correction of ``document`` from one framework's keys to another's.

    Overrides are for verl's own programs. Overrides translated from verl also switch verl's own correction off.

    Args:
        ignored: unknown keys that are not part of a correction.

    Returns:
        The translation as text, and remarks on keys of the document.

    Raises:
        SpecError: the correction is malformed, or the target cannot express it.

    Example:
        >>> print(translate({"is_correction_level": "token"}, "openrlhf", "verl")[0])
        rollout_is: token
        rollout_is_threshold: 0.5_5.0
    """
    reading = PEERS[source].read_source(document, frozenset(ignored))
    spec = CorrectionSpec.from_mapping(reading.plain)
    if target == "hydra":
        with initialize_composer():
            choice, *keys = build_overrides(spec)
        keys += [_LOSS_MODE] if _needs_gpg(spec) else []
        keys += _switch_verls_off(document) if source == "verl" else []
        text = "\n".join(map(shlex.quote, [f"+correction@{choice}", *keys]))
    else:
        text = yaml.safe_dump(_WRITERS[target](spec), sort_keys=False).strip()
    remarks = {
        "not part of a correction, so not translated": sorted(reading.ignored),
        "removing any of these does not change the translation": [
            f"{key}={format_value(value)}" for key, value in sorted(reading.idle.items())
        ],
    }
    return text, [f"{what}: {', '.join(keys)}" for what, keys in remarks.items() if keys]


def _switch_verls_off(document: Mapping[str, Any]) -> list[str]:
    """Build the overrides that reset verl's own correction, one for each key that differs from its default."""
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
    try:
        text, remarks = translate(read_document(options.config), options.source, options.target, options.ignore)
    except (SpecError, ValueError, OSError) as error:
        return refuse("translate", error)
    print(text)  # noqa: T201
    for remark in remarks:
        print(f"translate: {remark}", file=sys.stderr)  # noqa: T201
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(prog=name_program("translate"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--from", dest="source", required=True, choices=sorted(PEERS))
    parser.add_argument("--to", dest="target", default="hydra", choices=["hydra", *sorted(_WRITERS)])
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="ignore this key, which is not part of a correction",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
