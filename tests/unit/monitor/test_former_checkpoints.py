"""Checkpoints that an earlier layout of this package wrote are resumed with its bounds, fallback and decisions.

`tests/data/checkpoints` holds two, written before modules moved; the numbers below are what that code computed next.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.deferred_value import fetch
from recipe.offpolicy.fault_tolerance.checkpoints import check_before_loading
from recipe.offpolicy.monitor.active_correction import ActiveCorrection, find_differences
from recipe.offpolicy.monitor.alarms.alarm_settings import DEFAULTS as ALARMS
from recipe.offpolicy.monitor.bounds.bound_measurement import defer_histograms
from tests.support.paths import ROOT

FOLDERS = ROOT / "tests" / "data" / "checkpoints"
TIS = {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}
GSM = {"ratio": "rollout", "level": "sequence", "aggregate": "geometric", "lower": 0.99, "upper": 1.01, "when": "any"}
CONFIGURED = CorrectionSpec.from_mapping({"weight": TIS, "masks": {"gsm": GSM}})
FALLBACK = CorrectionSpec.from_mapping({"weight": TIS})
GOOD = {"rollout_ratio/ess": 0.9, "weight/ess": 0.9}


def config(folder: str) -> DictConfig:
    ess = {
        "action": "fallback",
        "patience": 1,
        "recovery_patience": 1,
        "return_after": 2,
        "fallback": {"options": ["tis_token"], "correction": FALLBACK.to_mapping()},
    }
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(FOLDERS / folder), "resume_mode": "auto", "resume_from_path": None},
            "correction": CONFIGURED.to_mapping(),
            "offpolicy": {
                "resume_changed_correction": False,
                "alarms": {name: {"action": "off"} for name in ALARMS} | {"ess": ess},
                "calibrate": {"target_kept": 0.9, "target_ess": 0.9, "warmup": 1},
            },
        }
    )


def resumed(folder: str) -> ActiveCorrection:
    made = config(folder)
    state = check_before_loading(made, CONFIGURED, partial(find_differences, made))
    assert state is not None
    active = ActiveCorrection(CONFIGURED, made)
    active.restore(state)
    return active


def seen(log_rho: list[float]) -> dict[str, Any]:
    """One update of rows of one token each, with these log-ratios."""
    old = torch.tensor(log_rho, dtype=torch.float64)[:, None]
    ones = torch.ones_like(old)
    reading = defer_histograms(
        CONFIGURED,
        {"correction.weight": "upper", "gsm": "both"},
        old_log_prob=old,
        rollout_log_prob=0 * ones,
        log_prob=old,
        response_mask=ones.bool(),
        advantages=ones,
    )
    return dict(fetch([reading])[0])


def test_moved_bounds_go_on_from_where_they_were() -> None:
    active = resumed("moved_bounds")
    assert active.spec.fingerprint() == 1447517447
    assert active.bounds == {
        "gsm": {"lower": 0.9827829564107875, "upper": 1.0173428423519233},
        "correction.weight": {"upper": 2.1757317184490237},
    }
    active.after_update(GOOD, seen([0.3, -0.2, 0.1, 0.0] * 5))
    gsm, weight = active.bounds["gsm"], active.bounds["correction.weight"]
    assert gsm["lower"] == pytest.approx(0.9793752834762478, rel=1e-9)
    assert gsm["upper"] == pytest.approx(1.020847338093258, rel=1e-9)
    assert weight["upper"] == pytest.approx(2.305649803099602, rel=1e-9)
    assert math.isclose(active.metrics()["calibrate/weight/ess"], 0.9686912587272997, rel_tol=1e-9)


def test_a_fallback_stays_in_force_until_the_run_is_quiet() -> None:
    active = resumed("fallback")
    assert (active.spec, active.spec.fingerprint()) == (FALLBACK, 1591711840)
    assert [active.after_update(GOOD, {}) for _ in range(2)] == [False, True]
    assert active.spec.fingerprint() == 1554838279
    assert active.bounds == {
        "gsm": {"lower": 0.9880120321448115, "upper": 1.0120119681431987},
        "correction.weight": {"upper": 1.9143566852070582},
    }
