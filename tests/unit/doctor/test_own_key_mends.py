"""Mistakes under ``offpolicy``: each is named, and what is proposed, pasted, passes the check that proposed it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from applications import NEEDED, application, changed
from mended import with_overrides
from omegaconf import DictConfig

from recipe.offpolicy.checks.own_keys import own_keys
from recipe.offpolicy.checks.reading import spec_of
from recipe.offpolicy.correction import Problem

ALARM = "offpolicy.alarms"
CALIBRATE = "offpolicy.calibrate"
RECORD = "offpolicy.record"
WATCHDOG = "offpolicy.watchdog"
MISTAKES: dict[str, dict[str, Any]] = {
    "a key that there is not": {"offpolicy.recrod": True},
    "a key of null that there is not": {"offpolicy.recrod": None},
    "a consent in words": {"offpolicy.allow_identical_log_probs": "yes"},
    "an alarm that there is not": {f"{ALARM}.entropy": {"action": "warn"}},
    "an alarm of null": {f"{ALARM}.ess": None},
    "a key of an alarm that there is not": {f"{ALARM}.ess.bound": 1},
    "an action that there is not": {f"{ALARM}.ess.action": "page"},
    "a bound in words": {f"{ALARM}.ess.lower": "low"},
    "no patience": {f"{ALARM}.ess.patience": 0},
    "half an update": {f"{ALARM}.ess.recovery_patience": 1.5},
    "a short window": {f"{ALARM}.mismatch_growth.window": 1},
    "no least": {f"{ALARM}.mismatch_growth.least": 0},
    "no bounds": {f"{ALARM}.ess.lower": None, f"{ALARM}.ess.recovery_lower": None},
    "bounds that cross": {f"{ALARM}.mean_weight.lower": 3.0},
    "one of two bounds": {f"{ALARM}.ess.recovery_lower": None},
    "a recovery that is looser": {f"{ALARM}.mean_weight.recovery_upper": 2.5},
    "a share above 1": {f"{ALARM}.kept_share.lower": 1.5},
    "a share below 0": {f"{ALARM}.ess.lower": -3},
    "nothing to fall back to": {f"{ALARM}.ess.action": "fallback"},
    "a return from nothing": {f"{ALARM}.ess.return_after": 9},
    "a key of calibration that there is not": {f"{CALIBRATE}.target": 0.98},
    "a target in percent": {f"{CALIBRATE}.target_kept": 98},
    "an ESS above 1": {f"{CALIBRATE}.target_ess": 2},
    "a side that there is not": {f"{CALIBRATE}.side": "left"},
    "a side of nothing": {f"{CALIBRATE}.side": "upper"},
    "a rate of nothing": {f"{CALIBRATE}.rate": 0.1},
    "no updates": {f"{CALIBRATE}.every": 0},
    "no rate": {f"{CALIBRATE}.target_kept": 0.98, f"{CALIBRATE}.rate": 0},
    "a mask that there is not": {f"{CALIBRATE}.target_kept": 0.98, f"{CALIBRATE}.of": ["icepop"]},
    "masks without a target of theirs": {f"{CALIBRATE}.target_ess": 0.9, f"{CALIBRATE}.of": ["gsm"]},
    "a cap below 1": {f"{CALIBRATE}.target_ess": 0.9, "correction.weight.upper": 1.0},
    "a key of the record that there is not": {f"{RECORD}.dri": "x"},
    "no steps": {f"{RECORD}.every": 0},
    "steps of nothing": {f"{RECORD}.every": 10},
    "a place that is no directory": {f"{RECORD}.dir": 7},
    "a place below a file": {f"{RECORD}.dir": __file__ + "/below"},
    "a key of the watchdog that there is not": {f"{WATCHDOG}.patience": 3},
    "a limit in words": {f"{WATCHDOG}.poll": "often"},
    "a phase that there is not": {f"{WATCHDOG}.phase_timeouts.rolout": 5},
}


@pytest.fixture(scope="module")
def base() -> Iterator[DictConfig]:
    with application("correction=[tis_token,gsm]", *NEEDED) as config:
        yield config


def found(config: DictConfig) -> list[Problem]:
    return list(own_keys(config, spec_of(config)))


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_proposed_mends_it(name: str, base: DictConfig) -> None:
    config = changed(base, MISTAKES[name])
    problems = found(config)
    assert problems
    for problem in problems:
        assert problem.key
        assert problem.advice
        assert problem.overrides
    mended = with_overrides(config, [each for problem in problems for each in problem.overrides])
    assert found(mended) == []


@pytest.mark.parametrize(
    ("key", "value"), [(ALARM, None), (CALIBRATE, None), (RECORD, "yes"), (f"{WATCHDOG}.phase_timeouts", 3)]
)
def test_what_an_override_takes_away_comes_back_only_without_it(key: str, value: Any, base: DictConfig) -> None:
    """An empty mapping in its place would switch off in silence what is shipped."""
    (problem,) = found(changed(base, {key: value}))
    assert problem.overrides == ()
    assert problem.fix.startswith("Remove this override")


def test_the_defaults_have_no_mistake(base: DictConfig) -> None:
    assert found(base) == []
