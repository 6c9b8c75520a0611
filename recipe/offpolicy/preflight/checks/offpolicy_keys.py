"""Validation of the keys under ``offpolicy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...correction import CorrectionSpec, Problem
from ...correction.problem import format_value, remove, set_to
from ...correction.spelling import find_closest
from ...delivery.delivery_settings import find_problems as delivery_problems
from ...extensions.registry import find_problems as extension_problems
from ...extensions.registry import load_extensions
from ...fault_tolerance.watchdog import find_problems as watchdog_problems
from ...monitor.alarms.alarm_settings import find_problems as alarm_problems
from ...monitor.bounds.bound_settings import find_problems as calibrate_problems
from ...monitor.mismatch.snapshot_settings import find_problems as snapshot_problems
from ...proof.drawn_rows import PROVE_EVERY
from ...recording.record_settings import find_problems as record_problems
from ...recording.record_settings import find_too_many_parts
from ...replay.replay_settings import find_problems as replay_problems
from ...staleness.staleness_settings import find_problems as staleness_problems

Validator = Callable[[DictConfig, CorrectionSpec], Iterator[Problem]]
"""Yields what is wrong with one key of ``offpolicy`` in a composed configuration."""


def _check_bool(name: str, config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    key = f"offpolicy.{name}"
    if not isinstance(value := OmegaConf.select(config, key), bool):
        yield Problem(key, value, "not a truth value.", "Set true or false.", parts=(), overrides=(set_to(key, False),))


def _check_prove_every(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    value = OmegaConf.select(config, PROVE_EVERY)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        fix = "Set a number of updates, such as 50, or 0 for the first update alone."
        there = (set_to(PROVE_EVERY, 50),)
        yield Problem(PROVE_EVERY, value, "not a whole number >= 0.", fix, parts=(), overrides=there)


def _build_unknown(name: str, section: DictConfig) -> Problem:
    """Build the problem of an unknown key, with the key of ours that it was meant for, if one is like it."""
    from ..own_keys import find_meant, list_groups  # which finds modules by this package

    values: Any = OmegaConf.to_container(section)
    key, value = f"offpolicy.{name}", values[name]
    near = find_closest(name, OWN_KEYS)
    meant = ("offpolicy", near) if near else find_meant((name,))
    if meant is None:
        return Problem(key, value, "unknown key.", f"Known under offpolicy: {', '.join(OWN_KEYS)}.", parts=())
    path, plain = ".".join(meant), not isinstance(value, dict)
    if plain and meant[0] in list_groups():  # a second option of a group would be refused
        return Problem(key, value, "unknown key.", f"Write {path}={format_value(value)} instead.", parts=())
    fits = plain and value is not None and not isinstance(values.get(meant[-1]), dict)
    moved = (*remove(key, value), set_to(path, value)) if fits else ()
    return Problem(key, value, "unknown key.", f"Did you mean {path}?", parts=(), overrides=moved)


def _checked_elsewhere(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Yield nothing: the reader of this key validates it."""
    return iter(())


def _check_watchdog(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    return watchdog_problems(config, [extension.phase or extension.section for extension in load_extensions(config)])


OWN_KEYS: dict[str, Validator] = {
    "allow_identical_log_probs": partial(_check_bool, "allow_identical_log_probs"),
    "allow_unrelated_log_probs": partial(_check_bool, "allow_unrelated_log_probs"),
    "resume_changed_correction": partial(_check_bool, "resume_changed_correction"),
    "alarms": alarm_problems,
    "calibrate": calibrate_problems,
    "delivery": lambda config, spec: delivery_problems(config),
    "extensions": lambda config, spec: extension_problems(config),
    "late_weights": lambda config, spec: snapshot_problems(config),
    "prove_every": _check_prove_every,
    "record": lambda config, spec: record_problems(config),
    "replay": lambda config, spec: replay_problems(config),
    "shadow": _checked_elsewhere,
    "shadow_delta": _checked_elsewhere,
    "staleness": lambda config, spec: staleness_problems(config),
    "watchdog": _check_watchdog,
}
"""Every key under ``offpolicy`` -> what may be wrong with its value."""


def check_own_keys(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Check the keys under ``offpolicy``: unknown ones, and invalid values."""
    section = config.get("offpolicy")
    if section is None:
        yield Problem("offpolicy", None, "its keys have no values.", "Remove this override.", parts=())
        return
    for name in map(str, section):
        if name not in OWN_KEYS:
            yield _build_unknown(name, section)
    for validate in OWN_KEYS.values():
        yield from validate(config, spec)
    yield from find_too_many_parts(config, spec)
