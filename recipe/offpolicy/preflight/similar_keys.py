"""Detection of overrides that resemble our keys, or name a correction, and have no effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ..correction import Problem

SECTIONS = ("correction", "offpolicy", "setup")
_EVERYWHERE = ("correction",)
"""Sections whose name is ours at any depth; ``offpolicy`` and ``setup`` are ours at the top alone."""
_ELSEWHERE = ("engine_kwargs", "ray_kwargs", "override_config")
"""Keys of verl below which names belong to other programs."""
_BELOW = {
    "correction": (
        *("weight", "weights", "masks", "proximal", "penalty", "denominator", "nonfinite", "baseline"),
        *("kl_clip", "kl_weight", "skyrl_compat"),
    ),
    "offpolicy": ("watchdog", "record", "alarms", "calibrate", "shadow", "shadow_delta"),
}
"""Keys of our sections, to recognise them where they stand at the top by mistake."""
_COMMON = frozenset({"none", "auto", "bypass", "reuse"})
"""Options whose names are words that other keys take too."""
_OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w.@/:-]+)\s*=\s*(?P<value>.*)", re.S)
_CLOSE = 0.85


def find_similar_keys(arguments: Iterable[str], options: Iterable[str]) -> Iterator[Problem]:
    """Find overrides whose key resembles one of our sections without being in it.

    Hydra answers ``corection=gsm`` by the advice to append the key, after which the run would train uncorrected.

    Args:
        arguments: of the command line, flags among them.
        options: of the group ``correction``.
    """
    names = set(options)
    for sign, key, value in _parse_overrides(arguments):
        section, _ = _find_resembled(key)
        if section:
            reason = f"no key of ours, and nothing would read it; it resembles {section}."
            yield Problem(
                f"{sign}{key}", _parse_value(value), reason, _format_spelling(section, key, value, names), parts=()
            )


def find_stray_options(
    arguments: Iterable[str], options: Iterable[str], exists: Callable[[str], bool]
) -> Iterator[Problem]:
    """Find added keys that hold a correction's name, or that stand at the top instead of below a section of ours.

    Args:
        arguments, options: as of ``find_similar_keys``.
        exists: tells whether the configuration has a key without the overrides that add it.
    """
    names = set(options)
    for sign, key, value in _parse_overrides(arguments):
        top = key.split(".")[0]
        if sign not in ("+", "++") or top in SECTIONS or exists(key):
            continue
        owner = next((section for section, below in _BELOW.items() if top in below), None)
        if owner is not None and not exists(top):
            reason = f"an added key that nothing of ours reads; ours is below {owner}."
            fix = f"Write {owner}.{key}={value} in its place, or give a key of your own another name."
        elif _is_option(value, names - _COMMON):
            reason = "an added key that nothing of ours reads, with the name of a correction."
            fix = _format_spelling("correction", key, value, names)
        else:
            continue
        yield Problem(f"{sign}{key}", _parse_value(value), reason, fix, parts=())


def _parse_overrides(arguments: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Parse overrides into (sign, key, value), without those below sections of other programs."""
    for argument in arguments:
        found = _OVERRIDE.fullmatch(argument.strip())
        if found and not argument.startswith("--") and not set(_ELSEWHERE) & set(_split_key(found["key"])):
            yield found["sign"], found["key"], found["value"].strip()


def _parse_value(value: str) -> Any:
    """Parse a value as Hydra does."""
    try:
        return OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException:
        return value


def _split_key(key: str) -> list[str]:
    return re.split(r"[./@]", key)


def _find_resembled(key: str) -> tuple[str, int]:
    """Find the section that a key seems meant for, and the index of its name in the key.

    The section is empty if the key is ours, or resembles none of them.
    """
    segments = _split_key(key)
    # A group below ours, or ours put into another package, is none of ours.
    if segments[0] in SECTIONS and not re.search("[@/]", key):
        return "", 0
    for place, segment in enumerate(segments):
        for section in SECTIONS if place == 0 else _EVERYWHERE:
            bare = segment.lower().replace("_", "").replace("-", "")
            close = difflib.SequenceMatcher(None, bare, section).ratio() >= _CLOSE
            if close or re.match(rf"{section}[_-]", segment):
                return section, place
    return "", 0


def _is_option(value: str, options: set[str]) -> bool:
    """Return True if a value is one of the options, or a list that holds one."""
    return bool({word.strip(" '\"") for word in value.strip("[] '\"").split(",")} & options)


def _format_spelling(section: str, key: str, value: str, options: set[str]) -> str:
    """Format the fix: how the override should be written."""
    if section == "correction" and _is_option(value, options):
        return f"Write correction={value} in its place."
    segments, (_, at) = _split_key(key), _find_resembled(key)
    beside = re.match(rf"{section}[_-](.+)", segments[at])
    below = [*([beside[1]] if beside else []), *segments[at + 1 :]]
    return f"Write {'.'.join([section, *below])}={value} in its place, or give a key of your own another name."
