"""Checks of the keys under ``offpolicy``, and of extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from omegaconf import OmegaConf

from ...batch.declared_keys import build_unknown
from ...correction.problem import Problem, find_closest, format_value, remove, set_to
from ...delivery.delivery_settings import find_problems as delivery_problems
from ...extensions.registry import find_problems as extension_problems
from ...fault_tolerance.watchdog import find_problems as watchdog_problems
from ...monitor.alarms.alarm_settings import find_problems as alarm_problems
from ...monitor.bounds.bound_settings import find_problems as calibrate_problems
from ...monitor.mismatch.snapshot_settings import find_problems as snapshot_problems
from ...proof.drawn_rows import PROVE_EVERY
from ...recording.record_settings import find_problems as record_problems
from ...recording.record_settings import find_too_many_parts
from ...replay.replay_settings import find_problems as replay_problems
from ...staleness.staleness_settings import find_problems as staleness_problems
from ..composed import MU_KEY, Composed

Validator = Callable[[Composed], Iterator[Problem]]


def _check_flag(name: str, run: Composed) -> Iterator[Problem]:
    key = f"offpolicy.{name}"
    if not isinstance(run.get(key), bool):
        yield run.problem(key, "not a truth value.", "Set true or false.", {key: False}, ())


def _check_prove_every(run: Composed) -> Iterator[Problem]:
    value = run.get(PROVE_EVERY)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        fix = "Set a number of updates, such as 50, or 0 for only the first update."
        yield run.problem(PROVE_EVERY, "not a whole number >= 0.", fix, {PROVE_EVERY: 50}, ())


_SECTIONS: dict[str, Validator] = {
    "alarms": lambda run: alarm_problems(run.config, run.spec),
    "calibrate": lambda run: calibrate_problems(run.config, run.spec),
    "delivery": lambda run: delivery_problems(run.config),
    "extensions": lambda run: extension_problems(run.config),
    "late_weights": lambda run: snapshot_problems(run.config),
    "prove_every": _check_prove_every,
    "record": lambda run: record_problems(run.config),
    "replay": lambda run: replay_problems(run.config),
    "staleness": lambda run: staleness_problems(run.config),
    "watchdog": lambda run: watchdog_problems(run.config, [each.phase or each.section for each in run.extensions]),
}
_FLAGS = ("allow_identical_log_probs", "allow_unrelated_log_probs", "resume_changed_correction")
OWN_KEYS: dict[str, Validator] = {
    **{name: partial(_check_flag, name) for name in _FLAGS},
    **_SECTIONS,
    **dict.fromkeys(("shadow", "shadow_delta"), lambda run: iter(())),  # their reader validates them
}
"""Every key under ``offpolicy`` -> the check of its value."""


def check_own_keys(run: Composed) -> Iterator[Problem]:
    """Refuse unknown keys under ``offpolicy``, and invalid values."""
    section = run.config.get("offpolicy")
    if section is None:
        yield run.problem(
            "offpolicy", "the section is null, so its keys have no values.", "Remove this override.", (), ()
        )
        return
    values: Any = OmegaConf.to_container(section)
    yield from (_build_unknown(name, values) for name in map(str, section) if name not in OWN_KEYS)
    for validate in OWN_KEYS.values():
        yield from validate(run)
    yield from find_too_many_parts(run.config, run.spec)


def _build_unknown(name: str, values: dict[str, Any]) -> Problem:
    """Build the problem for an unknown key, with the most similar key of ours, if there is one."""
    from ..own_keys import find_meant, list_groups  # which finds modules by this package

    key, value = f"offpolicy.{name}", values[name]
    near = find_closest(name, OWN_KEYS)
    meant = ("offpolicy", near) if near else find_meant((name,))
    if meant is None:
        return build_unknown(key, value, f"Known under offpolicy: {', '.join(OWN_KEYS)}.")
    path, plain = ".".join(meant), not isinstance(value, dict)
    if plain and meant[0] in list_groups():  # a second option of a group would be refused
        return build_unknown(key, value, f"Write {path}={format_value(value)} instead.")
    fits = plain and value is not None and not isinstance(values.get(meant[-1]), dict)
    moved = (*remove(key, value), set_to(path, value)) if fits else ()
    return build_unknown(key, value, f"Did you mean {path}?", *moved)


def warn_extensions(run: Composed) -> Iterator[Problem]:
    """Warn of extension settings that are probably unintended."""
    for extension in run.extensions:
        yield from (problem for problem in extension.problems(run.config) if problem.verdict != "ERROR")


def check_extensions(run: Composed) -> Iterator[Problem]:
    """Check each extension that is on, and that all of them work together."""
    for extension in run.extensions:
        yield from (problem for problem in extension.problems(run.config) if problem.verdict == "ERROR")
    first, *others = [each.section for each in run.extensions if each.replaces_estimator] or [""]
    for section in others:
        reason = f"this extension computes advantages instead of verl's estimator, and so does {first}."
        yield run.problem(section, reason, f"Set {section}=null, or {first}=null.", (), (section,), value="on")
    needy = tuple(each.section for each in run.extensions if each.worker() is not None)
    if needy and not run.get(MU_KEY):
        reason = f"the workers read the rollout's log-probs when {needy[0]} acts on the loss."
        yield run.problem(MU_KEY, reason, f"Set {MU_KEY}=true.", {MU_KEY: True}, needy, value=False)
