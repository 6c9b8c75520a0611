"""The active correction between updates; a resumed run continues with it, or says why not."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec, Reduction, Statistic
from recipe.offpolicy.fault_tolerance.checkpoints import CheckpointError, check_before_loading, guard_save
from recipe.offpolicy.monitor.active_correction import ActiveCorrection, find_differences
from recipe.offpolicy.monitor.alarm_settings import DEFAULTS as ALARMS
from tests.support import cap_cases
from tests.support.cap_cases import CAPPED
from tests.support.corrections import GSM, TIS, band, spec
from tests.support.histograms import histogram
from tests.support.paths import ROOT

CONFIGURED = spec(gsm=band(0.99, 1.01))
SAFER = spec(weight=TIS)
OTHER = spec(weight=TIS | {"upper": 3.0})
GOOD, BAD = {"rollout_ratio/ess": 0.9, "weight/ess": 0.9}, {"rollout_ratio/ess": 0.1, "weight/ess": 0.1}


def config(folder: Path = Path("."), *, correction: CorrectionSpec = CONFIGURED, **changes: Any) -> DictConfig:
    """A run with a fallback and moving bounds; ``changes`` are set by dotted key, with ``__`` for the dot."""
    alarm = {"action": "fallback", "patience": 1, "recovery_patience": 1, "return_after": 2}
    fallback = {"options": ["tis_token"], "correction": SAFER.to_mapping()}
    made = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None},
            "correction": correction.to_mapping(),
            "offpolicy": {
                "resume_changed_correction": False,
                "alarms": {name: {"action": "off"} for name in ALARMS} | {"ess": alarm | {"fallback": fallback}},
                "calibrate": {"target_kept": 0.9, "warmup": 1},
            },
        }
    )
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value, merge=False, force_add=True)
    return made


def seen(distance: float = 0.1) -> dict[str, Statistic]:
    """Ten rows at the same distance from agreement."""
    distances = histogram(torch.full((10,), distance, dtype=torch.float64), torch.ones(10, dtype=torch.bool))
    return {"gsm/distance": distances, "gsm/kept": Statistic(Reduction.MEAN, (5.0, 10.0))}


def active(made: DictConfig | None = None) -> ActiveCorrection:
    return ActiveCorrection(CONFIGURED, config() if made is None else made)


def test_a_fallback_has_no_moving_bounds_and_they_are_kept_meanwhile() -> None:
    made = active()
    made.after_update(GOOD, seen())
    bounds, keys = made.bounds, set(made.metrics())
    assert made.after_update(BAD, seen())
    assert made.spec == SAFER
    assert (made.moving, made.bounds) == ({}, {})
    # What is shown is of the update that was made, under the configured correction.
    assert made.metrics()["alarm/active_correction"] == 0.0
    assert made.metrics()["calibrate/gsm/kept"] == 0.5
    assert not made.after_update(GOOD, {})
    assert set(made.metrics()) == keys
    assert made.metrics()["alarm/active_correction"] == 1.0
    assert math.isnan(made.metrics()["calibrate/gsm/kept"])
    assert made.after_update(GOOD, {})
    assert made.bounds == bounds
    # What was seen before the fallback is forgotten: ten rows are new evidence.
    assert not made.after_update(GOOD, seen(1e-3))
    upper = made.bounds["gsm"]["upper"]
    assert upper is not None
    assert upper < (bounds["gsm"]["upper"] or 0.0)


# Checkpoints ------------------------------------------------------------------------------------------------


def saved(folder: Path, made: ActiveCorrection, run: DictConfig | None = None) -> None:
    """A checkpoint of step 4, written while ``made`` was active."""
    with guard_save(run or config(folder), 4, CONFIGURED if run is None else CAPPED, made.state()):
        (folder / "global_step_4" / "actor").mkdir(parents=True)
        (folder / "global_step_4" / "actor" / "model.pt").touch()


def resumed(made: DictConfig, correction: CorrectionSpec = CONFIGURED) -> ActiveCorrection:
    """Resume as the trainers do."""
    state = check_before_loading(made, correction, partial(find_differences, made))
    active = ActiveCorrection(correction, made)
    if state is not None:
        active.restore(state)
    return active


def test_a_resume_goes_on_with_the_fallback_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = active()
    made.after_update(GOOD, seen())
    bounds = made.bounds
    made.after_update(BAD, seen())
    saved(tmp_path, made)
    with caplog.at_level(logging.WARNING):
        again = resumed(config(tmp_path))
    assert "resuming with the fallback of alarm ess active: " in caplog.text
    assert (again.spec, again.moving) == (SAFER, {})
    # After two quiet updates the configured one is back, under its bounds.
    assert [again.after_update(GOOD, {}), again.after_update(GOOD, {})] == [False, True]
    assert again.bounds == bounds


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no calibration": (
        {"offpolicy__calibrate": {"target_kept": None}},
        "offpolicy.calibrate.target_kept: 0.9 in the checkpoint, null now",
    ),
    "another target": (
        {"offpolicy__calibrate__target_kept": 0.95},
        "offpolicy.calibrate.target_kept: 0.9 in the checkpoint, 0.95 now",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_schedule_stops_unless_it_is_meant(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes, expected = CHANGES[name]
    made = active()
    made.after_update(GOOD, seen())
    saved(tmp_path, made)
    with pytest.raises(CheckpointError) as stopped:
        resumed(config(tmp_path, **changes))
    assert expected in str(stopped.value)
    with caplog.at_level(logging.WARNING):
        again = resumed(config(tmp_path, offpolicy__resume_changed_correction=True, **changes))
    assert expected in caplog.text
    # With a schedule at all the bounds go on from where they were; without one they are the configured ones.
    assert again.spec == (CONFIGURED if name == "no calibration" else made.spec)


@pytest.mark.parametrize("gone", [True, False])
def test_a_fallback_that_is_not_configured_any_more(
    gone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = active()
    made.after_update(BAD, seen())
    saved(tmp_path, made)
    changes: dict[str, Any] = {"offpolicy__alarms__ess": {"action": "warn"}}
    if not gone:
        changes = {"offpolicy__alarms__ess__fallback__correction": OTHER.to_mapping()}
    with pytest.raises(CheckpointError) as stopped:
        resumed(config(tmp_path, **changes))
    now = "not there now" if gone else "3.0 now"
    assert f"offpolicy.alarms.ess.fallback.weight.upper: 2.0 in the checkpoint, {now}" in str(stopped.value)
    with caplog.at_level(logging.WARNING):
        again = resumed(config(tmp_path, offpolicy__resume_changed_correction=True, **changes))
    assert again.spec == CONFIGURED
    assert "the fallback of alarm ess was active; now the configured correction is active." in caplog.text


# A cap that moves ---------------------------------------------------------------------------------------------


# Checkpoints that an earlier layout of this package wrote: the numbers are what that code computed next ----------
BOTH = spec(weight=TIS, gsm=GSM)


def former(name: str) -> ActiveCorrection:
    calibrate = {"target_kept": 0.9, "target_ess": 0.9, "warmup": 1}
    return resumed(
        config(ROOT / "tests/data/checkpoints" / name, correction=BOTH, offpolicy__calibrate=calibrate), BOTH
    )


def test_moved_bounds_go_on_from_where_they_were() -> None:
    active = former("moved_bounds")
    assert active.spec.fingerprint() == 1447517447
    assert active.bounds == {
        "gsm": {"lower": 0.9827829564107875, "upper": 1.0173428423519233},
        "correction.weight": {"upper": 2.1757317184490237},
    }
    active.after_update(GOOD, cap_cases.seen([0.3, -0.2, 0.1, 0.0] * 5, BOTH, gsm="both"))
    gsm, weight = active.bounds["gsm"], active.bounds["correction.weight"]
    assert gsm["lower"] == pytest.approx(0.9793752834762478, rel=1e-9)
    assert gsm["upper"] == pytest.approx(1.020847338093258, rel=1e-9)
    assert weight["upper"] == pytest.approx(2.305649803099602, rel=1e-9)
    assert math.isclose(active.metrics()["calibrate/weight/ess"], 0.9686912587272997, rel_tol=1e-9)
