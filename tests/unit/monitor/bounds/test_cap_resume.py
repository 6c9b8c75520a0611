"""Resume of a run whose cap of the weight moves."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction.bounds import WEIGHT
from recipe.offpolicy.fault_tolerance.checkpoints import CheckpointError, check_before_loading, guard_save
from recipe.offpolicy.monitor.active_correction import ActiveCorrection, find_differences
from recipe.offpolicy.monitor.alarms.alarm_settings import DEFAULTS as ALARMS
from recipe.offpolicy.monitor.bounds.bound_settings import read_noted_keys
from tests.support.cap_cases import CAPPED, EVEN, SPREAD, config, seen
from tests.support.corrections import GSM, spec


def run_config(folder: Path, **calibrate: Any) -> DictConfig:
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
            "correction": CAPPED.to_mapping(),
            "offpolicy": {
                "resume_changed_correction": False,
                "alarms": {name: {"action": "off"} for name in ALARMS},
                "calibrate": calibrate,
            },
        }
    )


def saved(folder: Path, made: DictConfig, active: ActiveCorrection) -> None:
    with guard_save(made, 4, CAPPED, active.state()):
        (folder / "global_step_4" / "actor").mkdir(parents=True)
        (folder / "global_step_4" / "actor" / "model.pt").touch()


def resumed(made: DictConfig) -> ActiveCorrection:
    state = check_before_loading(made, CAPPED, partial(find_differences, made))
    assert state is not None
    active = ActiveCorrection(CAPPED, made)
    active.restore(state)
    return active


def test_a_resume_goes_on_with_the_cap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = run_config(tmp_path, target_ess=0.9, warmup=1)
    active = ActiveCorrection(CAPPED, made)
    assert active.moving == {WEIGHT: "upper"}
    for _ in range(3):
        assert not active.after_update({}, seen(EVEN))
    saved(tmp_path, made, active)
    with caplog.at_level(logging.INFO):
        again = resumed(made)
    assert "resuming with correction.weight at {'upper': 3.3" in caplog.text
    assert (again.spec, again.bounds) == (active.spec, active.bounds)
    assert again.bounds[WEIGHT]["upper"] == pytest.approx(2.0**1.728)
    for one in (active, again):
        one.after_update({}, seen(SPREAD))
    assert again.state() == active.state()


def test_another_target_stops_a_resume_unless_it_is_meant(tmp_path: Path) -> None:
    made = run_config(tmp_path, target_ess=0.9, warmup=1)
    active = ActiveCorrection(CAPPED, made)
    active.after_update({}, seen(EVEN))
    saved(tmp_path, made, active)
    with pytest.raises(CheckpointError, match=r"target_ess: 0\.9 in the checkpoint, 0\.8 now"):
        resumed(run_config(tmp_path, target_ess=0.8, warmup=1))
    with pytest.raises(CheckpointError, match=r"target_ess: 0\.9 in the checkpoint, null now"):
        resumed(run_config(tmp_path))
    other = run_config(tmp_path, target_ess=0.8, warmup=1)
    other.offpolicy.resume_changed_correction = True
    again = resumed(other)
    # What was measured does not depend on the target, but it goes the way of all keys: forgotten, and the cap kept.
    assert (again.bounds, again.state()["calibration"]["window"]) == (active.bounds, [])


def test_a_checkpoint_from_before_this_key_goes_on(tmp_path: Path) -> None:
    """Its keys have no target_ess, as those of a run today that does not set it."""
    masked = config(spec(gsm=GSM), target_kept=0.9, target_ess=None)
    assert "target_ess" not in read_noted_keys(masked)
    assert read_noted_keys(config(CAPPED))["target_ess"] == 0.9
    state = {"calibrate": read_noted_keys(masked), "fallback": None, "alarms": {"in_force": "configured"}}
    assert find_differences(masked, state) == []
