"""A value that no key under ``offpolicy`` takes is mended by what is proposed, when it is pasted."""

from __future__ import annotations

from typing import Any

import pytest
from applications import NEEDED, application, changed
from corrections import GSM
from mended import with_overrides
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.checks import spec_of
from recipe.offpolicy.checks.own_keys import own_keys
from recipe.offpolicy.composition import own_keys_for_us

pytestmark = pytest.mark.verl(">=0.9")

ALARM = "offpolicy.alarms.ess"
CALIBRATE = "offpolicy.calibrate"
ON = {f"{CALIBRATE}.target_kept": 0.98}


@pytest.fixture(scope="module")
def base() -> Any:
    with application("correction=[tis_token,gsm]", "actor_rollout_ref.rollout.name=vllm", *NEEDED) as config:
        yield config


# What is set, and of it the values after the pastes that keys have to have.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "truth": ({"offpolicy.allow_identical_log_probs": "yes"}, {"offpolicy.allow_identical_log_probs": False}),
    "unknown": ({"offpolicy.recrod": None}, {"offpolicy.recrod": None}),
    "unknown section": ({"offpolicy.recrod": {"dir": "x"}}, {"offpolicy.recrod": None}),
    "no alarms": ({"offpolicy.alarms": None}, {}),
    "no calibration": ({CALIBRATE: None}, {}),
    "no watchdog": ({"offpolicy.watchdog": None}, {}),
    "action": ({f"{ALARM}.action": "shout"}, {}),
    "bound": ({f"{ALARM}.lower": "low"}, {f"{ALARM}.lower": 0.3}),
    "patience": ({f"{ALARM}.patience": 0}, {f"{ALARM}.patience": 3}),
    "window": ({"offpolicy.alarms.mismatch_growth.window": 1}, {}),
    "least": ({"offpolicy.alarms.mismatch_growth.least": -1.0}, {}),
    "no bound": ({f"{ALARM}.lower": None, f"{ALARM}.recovery_lower": None}, {}),
    "crossed": ({f"{ALARM}.upper": 0.1, f"{ALARM}.recovery_upper": 0.05}, {}),
    "one of a pair": ({f"{ALARM}.recovery_lower": None}, {}),
    "looser": ({f"{ALARM}.recovery_lower": 0.1}, {f"{ALARM}.recovery_lower": 0.3}),
    "early return": (
        {f"{ALARM}.action": "fallback", f"{ALARM}.fallback": ["opsm"], f"{ALARM}.return_after": 1},
        {f"{ALARM}.return_after": 3},
    ),
    "nothing to fall back to": ({f"{ALARM}.action": "fallback"}, {f"{ALARM}.fallback": ["tis_token", "gsm"]}),
    "target": ({f"{CALIBRATE}.target_kept": 2}, {f"{CALIBRATE}.target_kept": 0.98}),
    "side": (ON | {f"{CALIBRATE}.side": "left"}, {f"{CALIBRATE}.side": "both"}),
    "of": (ON | {f"{CALIBRATE}.of": 3}, {f"{CALIBRATE}.of": ["gsm"]}),
    "of no mask": (ON | {f"{CALIBRATE}.of": ["gms"]}, {f"{CALIBRATE}.of": ["gsm"]}),
    "target of a weight": ({f"{CALIBRATE}.target_ess": 90}, {f"{CALIBRATE}.target_ess": 0.9}),
    "target of a weight without a cap": (
        {f"{CALIBRATE}.target_ess": 0.9, "correction.weight.upper": None},
        {f"{CALIBRATE}.target_ess": None},
    ),
    "every": ({f"{CALIBRATE}.every": 0}, {f"{CALIBRATE}.every": 1}),
    "warmup": ({f"{CALIBRATE}.warmup": "long"}, {f"{CALIBRATE}.warmup": 4}),
    "rate": ({f"{CALIBRATE}.rate": 0}, {f"{CALIBRATE}.rate": 0.2}),
    "ceiling": ({f"{CALIBRATE}.ceiling": 0.5}, {f"{CALIBRATE}.ceiling": 10.0}),
    "recording": ({"offpolicy.record": 5}, {}),
    "recording's share": (
        {"offpolicy.record.dir": "x", "offpolicy.record.share": 2},
        {"offpolicy.record.share": 1.0},
    ),
    "more masks than a recording tells apart": (
        {"offpolicy.record.dir": "x", "correction.masks": {f"m{number}": GSM for number in range(33)}},
        {"offpolicy.record.dir": None},
    ),
    "phases": ({"offpolicy.watchdog.phase_timeouts": 5}, {"offpolicy.watchdog.phase_timeouts": {}}),
    "seconds": ({"offpolicy.watchdog.step_timeout": -5}, {"offpolicy.watchdog.step_timeout": None}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_mended(name: str, base: DictConfig) -> None:
    changes, expected = REFUSED[name]
    config = changed(base, changes)
    assert list(own_keys(config, spec_of(config))), "nothing is refused"
    for _ in range(4):
        found = list(own_keys(config, spec_of(config)))
        if not found:
            break
        assert all(problem.overrides for problem in found), found
        proposed = list(dict.fromkeys(each for problem in found for each in problem.overrides))
        config = with_overrides(config, own_keys_for_us(proposed))
    assert list(own_keys(config, spec_of(config))) == []
    plain: Any = {key: OmegaConf.select(config, key) for key in expected}
    assert {k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in plain.items()} == expected
