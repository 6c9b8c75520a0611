"""The names of our keys, read from the shipped YAML files and the registry, and the names of keys in verl."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_patches.hydra_sections import PROVIDER

from ..correction.problem import find_closest
from ..extensions.add_on import SHIPPED
from .python_source import find_source

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
_BASE = "offpolicy_base"
_VERLS = frozenset({"defaults", "hydra", "actor_rollout_ref"})
"""Top-level keys of the base file that are not sections of ours."""
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_IN_YAML = re.compile(r"^[ \t-]*([A-Za-z_]\w*)\s*:", re.M)
_IN_PYTHON = re.compile(r"config[\w.\[\]\"']*\.get\(\s*[\"'](\w+)[\"']|^    ([a-z_]\w*)\s*:", re.M)

Path_ = tuple[str, ...]


@cache
def list_sections() -> frozenset[str]:
    """List our top-level sections, from the base file and registered extensions."""
    return frozenset(set(_load_base()) | SHIPPED.keys())


@cache
def list_groups() -> dict[str, tuple[str, ...]]:
    """List our Hydra groups with their options, except the group that only adds our sections."""
    folders = (each for each in sorted(CONFIG_DIR.iterdir()) if each.is_dir() and each.name != PROVIDER)
    return {folder.name: tuple(sorted(_list_options(folder))) for folder in folders}


def _list_options(folder: Path) -> Iterator[str]:
    return (file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))


@cache
def list_paths() -> Mapping[Path_, bool]:
    """List all our keys as segments from the top level; True marks sections."""
    found = dict(_flatten(_load_base(), ()))
    for group in list_groups():
        for file in (CONFIG_DIR / group).rglob("*.yaml"):
            text = file.read_text(encoding="utf-8")
            package = named[1] if (named := _PACKAGE.match(text)) else group
            if package == "_global_":
                continue  # sets keys of verl
            prefix = tuple(package.split("."))
            found |= {prefix: True, **dict(_flatten(_load(text), prefix))}
    return {path: held for path, held in found.items() if len(path) > 1 or path[0] in list_sections()}


@cache
def list_verls_names() -> frozenset[str]:
    """List the key names that the installed verl ships, declares, or reads from a configuration, at any depth."""
    source = find_source("verl")
    names: set[str] = set()
    for file in source.parent.rglob("*") if source is not None else ():
        if file.suffix == ".yaml":
            names |= set(_IN_YAML.findall(file.read_text(encoding="utf-8")))
        elif file.suffix == ".py":
            read = _IN_PYTHON.findall(file.read_text(encoding="utf-8"))
            names |= {key for key, _ in read} | ({key for _, key in read} if file.parent.name == "config" else set())
    return frozenset(names - {""})


def find_meant(segments: Sequence[str], *, verls: bool = False, sections: bool = False) -> Path_ | None:
    """Find our key that ends in the given segments, allowing for misspelling; None if there is none.

    Args:
        verls: search instead the verl keys that our groups set.
        sections: whether to search only sections.
    """
    matching = [
        path
        for path, holds_keys in list_paths().items()
        if len(path) >= len(segments)
        and (holds_keys or not sections)
        and verls == (path[0] in _VERLS)
        and all(_alike(given, name) for given, name in zip(segments, path[-len(segments) :], strict=True))
    ]
    written = ".".join(segments)

    def rank(path: Path_) -> tuple[float, int]:
        """Rank by similarity of spelling, then by depth in the configuration."""
        return -difflib.SequenceMatcher(None, written, ".".join(path[-len(segments) :])).ratio(), len(path)

    return min(matching, key=rank, default=None)


def complete(path: Path_, rest: Sequence[str]) -> Path_:
    """Extend a section's path with the segments given under it, each spelled as in our keys."""
    for name in rest:
        below = [known[len(path)] for known in list_paths() if known[: len(path)] == path and len(known) > len(path)]
        begun = [each for each in below if each.startswith(name)]
        path = (*path, find_closest(name, below) or next(iter(begun), name))
    return path


def list_children(path: Path_) -> list[str]:
    """List the keys directly under a section of ours."""
    return [known[-1] for known in list_paths() if known[:-1] == path]


def _alike(given: str, name: str) -> bool:
    # Short names resemble too many other names.
    return given == name or (len(given) > 2 and len(name) > 2 and find_closest(given, [name], 0.85) is not None)


def _load_base() -> dict[str, Any]:
    plain = _load((CONFIG_DIR / f"{_BASE}.yaml").read_text(encoding="utf-8"))
    chosen = {group for default in plain["defaults"] if isinstance(default, dict) for group in default}
    return {group: {} for group in chosen} | {key: value for key, value in plain.items() if key not in _VERLS}


def _load(text: str) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return plain


def _flatten(values: Mapping[str, Any], prefix: Path_) -> Iterator[tuple[Path_, bool]]:
    for name, value in values.items():
        if (name, prefix[1:]) == ("defaults", ()) or str(name).startswith("_"):
            continue
        yield (*prefix, str(name)), isinstance(value, Mapping)
        if isinstance(value, Mapping):
            yield from _flatten(value, (*prefix, str(name)))
