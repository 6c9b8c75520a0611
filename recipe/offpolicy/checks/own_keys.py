"""The keys under ``offpolicy``: which there are, and what each may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ..alarms.settings import DEFAULTS as ALARMS
from ..alarms.settings import problems as alarm_problems
from ..calibration.online_settings import DEFAULTS as CALIBRATE
from ..calibration.online_settings import problems as calibrate_problems
from ..correction import CorrectionSpec
from ..findings import Finding, Problem, named_overrides, set_to, taken_away
from ..recording.card import FIX as ANOTHER
from ..recording.settings import problems as record_problems
from ..recording.settings import too_many_parts
from ..watchdog import problems as watchdog_problems

Validator = Callable[[DictConfig], Iterator[Finding]]
"""Yields what is wrong with one key of ``offpolicy`` in a composed configuration."""


def _truth(key: str, config: DictConfig) -> Iterator[Finding]:
    if not isinstance(value := OmegaConf.select(config, f"offpolicy.{key}"), bool):
        yield f"offpolicy.{key}", value, "not a truth value.", "Set true or false."


def _elsewhere(config: DictConfig) -> Iterator[Finding]:
    """Validated where it is read."""
    return iter(())


_DIRECTORY = "offpolicy.record.dir"
_NUMBER = re.compile(r"Set (-?\d[\w.+-]*?)(?:,| or|\.$)")
_FIRST = re.compile(r"Choose of (\w+)(?:,|\.)(?! masks)")
_BOUNDS = ("lower", "upper", "recovery_lower", "recovery_upper")

OWN_KEYS: dict[str, Validator] = {
    "allow_identical_log_probs": partial(_truth, "allow_identical_log_probs"),
    "allow_unrelated_log_probs": partial(_truth, "allow_unrelated_log_probs"),
    "resume_changed_correction": partial(_truth, "resume_changed_correction"),
    "alarms": alarm_problems,
    "calibrate": calibrate_problems,
    "record": record_problems,
    "shadow": _elsewhere,
    "shadow_delta": _elsewhere,
    "watchdog": watchdog_problems,
}
"""Every key under ``offpolicy`` -> what may be wrong with its value."""


def own_keys(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Unknown keys, and values that no key takes."""
    if config.get("offpolicy") is None:
        yield _problem("offpolicy", None, "its keys have no values.", "Remove this override.")
        return
    for key in map(str, config.offpolicy):
        if key not in OWN_KEYS:
            fix = f"Remove offpolicy.{key}."
            name, value = f"offpolicy.{key}", config.offpolicy[key]
            yield Problem(name, value, "unknown key.", fix, "WRONG", (), taken_away(name, value))
    for validate in OWN_KEYS.values():
        yield from (_problem(*finding) for finding in validate(config))
    yield from (_problem(*finding) for finding in too_many_parts(config, spec))


def _problem(key: str, value: object, reason: str, fix: str) -> Problem:
    return Problem(key, value, reason, fix, "WRONG", (), _mends(key, value, reason, fix))


def _mends(key: str, value: object, reason: str, fix: str) -> tuple[str, ...]:
    """What the sentence of a fix comes to as overrides; what is shipped where it leaves the value open."""
    if fix == "Set true or false.":
        return (set_to(key, False),)
    if reason.startswith("unknown key") or reason in ("no phase has this name.", "no alarm has this name."):
        return taken_away(key, value)
    if key == _DIRECTORY:
        return _elsewhere_recorded(value, fix)
    if "null for any time" in fix:
        return (set_to(key, None),)
    if fix.startswith("Set {") or fix == "Remove this override.":
        return (f"{key}={{}}",)
    if fix.startswith("Set a bound"):
        return _shipped(key)
    if named := named_overrides(fix):
        return named
    if (number := _NUMBER.match(fix)) is not None:
        return (f"{key}={number[1]}",)
    if (first := _FIRST.match(fix)) is not None:
        return (f"{key}=[{first[1]}]",)
    return _shipped(key)


def _shipped(key: str) -> tuple[str, ...]:
    """The value that a key has where nobody sets it; of an alarm's bounds all, for they go together."""
    *_, owner, name = key.split(".")
    if owner in ALARMS:
        names = _BOUNDS if name in _BOUNDS else (name,)
        return tuple(set_to(f"offpolicy.alarms.{owner}.{each}", ALARMS[owner][each]) for each in names)
    return (set_to(key, CALIBRATE[name]),) if owner == "calibrate" and name in CALIBRATE else ()


def _elsewhere_recorded(value: object, fix: str) -> tuple[str, ...]:
    """Another directory beside one that is taken; no recording where none can be; the key that the fix names."""
    if "=" in fix and "=PATH" not in fix and _DIRECTORY not in fix:
        return named_overrides(fix)
    if fix != ANOTHER or not isinstance(value, str):
        return (set_to(_DIRECTORY, None),)
    free = next(name for n in count(2) if not Path(name := f"{value.rstrip('/')}_{n}").exists())
    return (set_to(_DIRECTORY, free),)
