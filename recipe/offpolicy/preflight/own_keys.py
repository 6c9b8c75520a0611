"""The names of our keys, and the detection of unused overrides that resemble our keys or that name a correction.

Our names are read from the shipped YAML files and the registry, verl's from its source.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_patches.hydra_sections import PROVIDER
from verl_patches.moved_options import MOVED, rename

from ..correction import Problem
from ..correction.problem import Verdict, find_closest
from ..extensions.add_on import SHIPPED
from .checks.verl_correction import FREE
from .checks.verl_correction import find_meant as find_verls_meant
from .composed import VERL
from .python_source import find_source

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
_BASE = "offpolicy_base"
_VERLS = frozenset({"defaults", "hydra", "actor_rollout_ref"})
"""Top-level keys of the base file that are not our sections."""
_COMMON = frozenset({"none", "auto", "bypass", "reuse"})
"""Options whose names are also values of other keys."""
_OPTIONAL = "router_replay"
_SET_BY_OPTIONAL = ("actor_rollout_ref", "actor", "fsdp_config", "router_replay", "mode")
"""A group whose nonexistent options Hydra ignores, and the verl key that was meant."""
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w.@/:-]+)\s*=\s*(?P<value>.*)", re.S)
_CORRECTION = "correction"
_CORRECTS = re.compile(
    r"importance_(?:samp|weight|ratio)|(?:^|_)tis(?:_|$)|truncated_is|ice_?pop|off_?policy_|^corrections?_"
)
"""Names that other frameworks, or users of this one, give to corrections."""
TARGET = "_target_"
_MADE = ("actor_rollout_ref.rollout", "actor_rollout_ref.model")
"""Sections that each launch converts to verl's dataclasses, which reject unknown keys; the actor has its own check."""
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
            if package.split(".")[0] in list_sections():  # other packages are keys of verl
                prefix = tuple(package.split("."))
                found |= {prefix: True, **dict(_flatten(_load(text), prefix))}
    return found


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


def find_meant(segments: Sequence[str], *, sections: bool = False) -> Path_ | None:
    """Find our key or section that ends in the given segments, allowing for misspelling; None if there is none."""
    matching = [
        path
        for path, holds_keys in list_paths().items()
        if len(path) >= len(segments)
        and (holds_keys or not sections)
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
        path = (*path, find_closest(name, list_children(path)) or name)
    return path


def list_children(path: Path_) -> list[str]:
    """List the keys directly under one of our sections."""
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


def find_similar_keys(arguments: Iterable[str]) -> Iterator[Problem]:
    """Before Hydra composes, find overrides whose first name resembles one of our sections or groups, but is not one.

    For ``corection=gsm``, Hydra suggests appending the key, after which the run would train uncorrected.
    """
    sections, groups = list_sections(), list_groups()
    for sign, key, value in _parse_overrides(arguments):
        named, _, package = key.partition("@")
        first, *rest = re.split("[./]", named)
        meant: Path_ | None = None
        if first in sections or first in groups:
            # A group under one of ours, or our group in another package, is not one of ours.
            if "/" in named or package not in ("", *([first] if first in sections else [])):
                meant = (first,)
            elif first == _OPTIONAL and value not in groups[first] and "$" not in value:
                meant = _SET_BY_OPTIONAL
        elif near := find_closest(first, {*sections, *groups}, 0.85):
            meant = complete((near,), rest) if near in sections else (near,) if value in groups[near] else None
            if near == _OPTIONAL and meant is None:
                meant = _SET_BY_OPTIONAL
        if meant is not None:
            yield _build(sign, key, value, meant, "not a key of this package, so it would be unused")


def find_stray_keys(
    arguments: Iterable[str], base: DictConfig, options: Iterable[str], registered: Collection[str] = ()
) -> Iterator[Problem]:
    """Find added keys that nothing reads: misplaced keys of ours, names of corrections, and keys unknown to verl.

    Args:
        arguments: overrides on the command line.
        base: the configuration without the overrides that add keys.
        options: options of the group ``correction``.
        registered: sections of extensions, including the user's.
    """
    names = {*options, *MOVED} - _COMMON
    known = {*list_sections(), *list_groups(), *registered}
    for sign, key, value in _parse_overrides(arguments):
        skipped = re.split("[./@]", key)[0] in known or has_key(base, key) or any(map(FREE.search, key.split(".")))
        if sign not in ("+", "++") or skipped:
            continue
        if problem := explain_misplaced(sign, key, value, base):
            yield problem
        elif near := find_closest(re.split("[./@]", key)[0], {*registered} - list_sections(), 0.85):
            meant = key.replace(key.split(".")[0], near, 1)
            reason = f"this key was added, but nothing reads it; it resembles {meant}."
            fix = f"Write +{meant}={value}, or rename the key if it is your own."
            yield Problem(f"{sign}{key}", _parse_value(value), reason, fix, parts=())
        elif _is_option(value, names):
            reason = "this key was added with the name of a correction, but this package does not read it."
            fix = f"Write {_CORRECTION}={rename(value)} instead."
            yield Problem(f"{sign}{key}", _parse_value(value), reason, fix, parts=())
        elif option := next((each for each in key.split(".") if each in names - list_verls_names()), None):
            reason = f"this key was added, but nothing reads it. It is nested below the option name {option}."
            keys = f"{_CORRECTION}.weight or {_CORRECTION}.masks"
            fix = f"Choose {_CORRECTION}={rename(option)}, and set its keys below {keys}."
            yield Problem(f"{sign}{key}", _parse_value(value), reason, fix, parts=())
        elif not set("@/") & set(key):
            yield from _find_unread(sign, key, value, base)


def has_key(config: DictConfig, key: str) -> bool:
    """Return True if a configuration has a key, even if the key's value is null or still missing."""
    try:
        return OmegaConf.select(config, key, default=..., throw_on_missing=False) is not ...
    except OmegaConfBaseException:  # an interpolation that cannot be resolved, or no key at all
        return False


def list_fields(section: Any) -> frozenset[str] | None:
    """List the fields of a section's verl dataclass; None if there is no dataclass or it cannot be imported."""
    target = section.get(TARGET) if isinstance(section, DictConfig) and TARGET in section else None
    if target is None:
        return None
    try:
        return frozenset(field.name for field in dataclasses.fields(get_class(str(target))))
    except Exception:  # of any type: the training machine may have other packages
        return None


def _find_unread(sign: str, key: str, value: str, base: DictConfig) -> Iterator[Problem]:
    """Find an added key that verl rejects or that it does not have."""
    names = key.split(".")
    if find_verls_meant(names) is not None or key.startswith(f"{VERL}."):
        return  # a check of the whole configuration reports it
    depth = next(depth for depth in range(len(names)) if not has_key(base, ".".join(names[: depth + 1])))
    section: Any = OmegaConf.select(base, ".".join(names[:depth])) if depth else base
    # The user names the subsections of a section that has no other keys, such as teachers.
    takes_any = not isinstance(section, DictConfig) or all(
        isinstance(section._get_node(name), DictConfig) for name in section
    )
    if depth and takes_any:
        return
    fields = list_fields(section)
    verdict: Verdict = "ERROR"
    if fields is not None and ".".join(names[:2]) in _MADE:
        if names[depth] in fields:
            return
        near = find_closest(names[depth], fields)
        reason = f"verl rejects it: {section[TARGET].rpartition('.')[2]} has no field {names[depth]}."
    elif depth and names[depth] in {*list_verls_names(), *(fields or ())}:
        return
    else:
        near = find_closest(names[depth], map(str, section), 0.85)
        corrects = any(map(_CORRECTS.search, names[depth:]))
        reason = "this key was added, but neither verl nor this recipe reads it; only your own code may read it."
        if corrects:
            reason = "this key was added and names a correction, but neither verl nor this recipe reads it."
        verdict = "ERROR" if corrects else "NOTE"
    fix = f"Did you mean {'.'.join([*names[:depth], near, *names[depth + 1 :]])}?" if near else ""
    if "names a correction" in reason and not near:
        fix = f"Choose one with {_CORRECTION}=NAME (docs/corrections.md), or rename the key if it is your own."
    yield Problem(f"{sign}{key}", _parse_value(value), reason, fix, verdict, ())


def explain_misplaced(sign: str, key: str, value: str, base: DictConfig) -> Problem | None:
    """Explain a missing key that is one of our keys, but misplaced or misspelled; None if it is not ours."""
    segments = tuple(key.partition("@")[0].replace("/", ".").split("."))
    for start in range(len(segments) if has_key(base, segments[0]) else 1):
        if any(map(FREE.search, segments[:start])):
            break
        first, *rest = tail = segments[start:]
        # A single name that resembles one of our groups, with one of the group's options.
        near = find_closest(first, list_groups(), 0.85) if start and not rest else None
        group = (near,) if near and _is_option(value, set(list_groups()[near]) - _COMMON) else None
        meant = group or find_meant(tail)
        if len(tail) == 2 and segments != _SET_BY_OPTIONAL and all(map(_alike, tail, _SET_BY_OPTIONAL[-2:])):
            meant = _SET_BY_OPTIONAL
        if meant is None and (section := find_meant([first], sections=True)):
            meant = complete(section, rest)
        if meant is None and start == 0:
            meant = _find_joined(first, rest)
        if meant is None or not (group or meant is _SET_BY_OPTIONAL or _is_distinct(tail, meant, start)):
            continue
        reason = f"{'this added' if sign else 'this'} key is unused {'at the top level' if start == 0 else 'there'}"
        plain = start > 0 and not group and not rest and "_" not in meant[-1] and not list_paths().get(meant)
        return _build(sign, key, value, meant, reason, "NOTE" if plain else "ERROR")
    return None


def _find_joined(first: str, rest: Sequence[str]) -> Path_ | None:
    """Find our key if it is joined to its section's name, as in ``staleness_eta`` and ``setup_model``."""
    sections = {path[-1]: path for path, holds_keys in reversed(list(list_paths().items())) if holds_keys}
    for name in sorted(sections, key=len, reverse=True):
        if joined := re.match(rf"{name}[_-](.+)", first.lower()):
            whole = complete(sections[name], [joined[1], *rest])
            return whole if whole in list_paths() else None
    return None


def _is_distinct(tail: Path_, meant: Path_, start: int) -> bool:
    """Return True if the names cannot be meant for verl, even if verl also uses some of them."""
    verls = list_verls_names()
    if start == 0:
        return tail[0] not in verls or (len(tail) > 1 and not verls.issuperset(tail))
    # Under a verl section, a single leaf must be almost identical to our key to count as meant for us.
    leaf = len(tail) == 1 and not list_paths().get(meant)
    return tail[0] not in verls and (not leaf or find_closest(tail[0], meant[-1:], 0.9) is not None)


def _parse_overrides(arguments: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Parse overrides into (sign, key, value)."""
    for argument in arguments:
        found = _OVERRIDE.fullmatch(argument.strip())
        if found and not argument.startswith("--") and not found["key"].startswith("hydra."):
            yield found["sign"], found["key"], found["value"].strip()


def _parse_value(value: str) -> Any:
    """Parse a value as Hydra does."""
    try:
        return OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return value


def _is_option(value: str, options: set[str]) -> bool:
    """Return True if a value is one of the options, or a list that contains one."""
    return bool({word.strip(" '\"") for word in value.strip("[] '\"").split(",")} & options)


def _build(sign: str, key: str, value: str, meant: Path_, reason: str, verdict: Verdict = "ERROR") -> Problem:
    children = list_children(meant)
    if len(children) == 1 and not value.startswith("{"):
        meant = (*meant, *children)
    reason = f"{reason}; it resembles {'.'.join(meant)}."
    plus = sign if meant[0] not in list_sections() and len(meant) == 1 else ""
    fix = f"{plus}{_spell(meant, value)}, or rename the key if it is your own."
    return Problem(f"{sign}{key}", _parse_value(value), reason, f"Write {fix}", verdict, ())


def _spell(meant: Path_, value: str) -> str:
    """Format the override as the user would write it."""
    key, (top, *below) = ".".join(meant), meant
    options = list_groups().get(top, ())
    if _is_option(value, {*options, *(MOVED if top == _CORRECTION else ())} - (_COMMON if below else set())):
        return f"{top}={rename(value) if top == _CORRECTION else value}"
    if options and not below:
        near = find_closest(value, options)
        return f"{top}={near}" if near else f"{top}= with one of {', '.join(options)}"
    if list_paths().get(meant) and not value.startswith("{"):
        return f"a key below {key}: {', '.join(list_children(meant))}"
    return f"{key}={value}"
