"""The keys under ``offpolicy``: which there are, and what each may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from ..alarms.settings import problems as alarm_problems
from ..calibration.online_settings import problems as calibrate_problems
from ..correction import CorrectionSpec
from ..findings import Finding, Problem, named_overrides, set_to, taken_away
from ..recording.card import FIX as ANOTHER
from ..recording.settings import problems as record_problems
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


def _problem(key: str, value: object, reason: str, fix: str) -> Problem:
    if fix == "Set true or false.":
        overrides: tuple[str, ...] = (set_to(key, False),)
    elif reason.startswith("unknown key") or reason in ("no phase has this name.", "no alarm has this name."):
        overrides = taken_away(key, value)
    elif key == _DIRECTORY:
        overrides = _elsewhere_recorded(value, fix)
    elif "null for any time" in fix:
        overrides = (set_to(key, None),)
    elif fix.startswith("Set {"):
        overrides = (f"{key}={{}}",)
    else:
        overrides = named_overrides(fix)
    return Problem(key, value, reason, fix, "WRONG", (), overrides)


def _elsewhere_recorded(value: object, fix: str) -> tuple[str, ...]:
    """Another directory beside one that is taken; no recording where none can be; the key that the fix names."""
    if "=" in fix and "=PATH" not in fix and _DIRECTORY not in fix:
        return named_overrides(fix)
    if fix != ANOTHER or not isinstance(value, str):
        return (set_to(_DIRECTORY, None),)
    free = next(name for n in count(2) if not Path(name := f"{value.rstrip('/')}_{n}").exists())
    return (set_to(_DIRECTORY, free),)
