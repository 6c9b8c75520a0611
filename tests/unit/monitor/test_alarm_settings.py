"""The keys under offpolicy.alarms, and the answer to each mistake."""

from __future__ import annotations

import math
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.alarm_settings import DEFAULTS, OF_EXTENSIONS, find_problems, read_settings
from recipe.offpolicy.monitor.alarms import find_statistic, read_value
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import CONFIGS
from tests.support.corrections import GSM, TIS, opsm, run, values

KEY = "offpolicy.alarms"
CORRECTION = {"weight": TIS, "masks": {"gsm": GSM}}


def config(changes: dict[str, Any] | None = None, correction: dict[str, Any] | None = None) -> DictConfig:
    shipped: Any = OmegaConf.load(CONFIGS / "offpolicy_base.yaml")
    made = OmegaConf.create({"offpolicy": {"alarms": shipped.offpolicy.alarms}, "correction": correction or CORRECTION})
    OmegaConf.update(made, "actor_rollout_ref.rollout.calculate_log_probs", True)
    for key, value in (changes or {}).items():
        OmegaConf.update(made, key, value, merge=False, force_add=True)
    return made


def found(changes: dict[str, Any], correction: dict[str, Any] | None = None) -> list[str]:
    made = config(changes, correction)
    return [str(problem) for problem in find_problems(made, Composed(made).spec)]


ESS, MEAN = f"{KEY}.ess", f"{KEY}.mean_weight"
BACK = {f"{ESS}.action": "fallback", f"{ESS}.fallback": ["gsm"]}
SHIPPED = (f"{ESS}.lower=0.3", f"{ESS}.upper=null", f"{ESS}.recovery_lower=0.4", f"{ESS}.recovery_upper=null")
WRONG: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "null": ({ESS: None}, ESS, (f"{ESS}={{action: 'off'}}",)),
    "inverted": ({f"{ESS}.upper": 0.2, f"{ESS}.recovery_upper": 0.1}, f"{ESS}.lower", SHIPPED),
    "looser below": ({f"{ESS}.recovery_lower": 0.2}, f"{ESS}.recovery_lower", (f"{ESS}.recovery_lower=0.3",)),
    "nothing": ({f"{ESS}.action": "fallback"}, f"{ESS}.fallback", (f"{ESS}.fallback=[tis_token, gsm]",)),
    "too early": (BACK | {f"{ESS}.return_after": 2}, f"{ESS}.return_after", (f"{ESS}.return_after=3",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_found_with_its_fix(name: str) -> None:
    changes, key, overrides = WRONG[name]
    made = config(changes)
    (problem,) = find_problems(made, Composed(made).spec)
    assert (problem.key, problem.overrides) == (key, overrides)
    assert problem.advice


@pytest.mark.parametrize(
    ("name", "bound", "value"), [("kept_share", "lower", 1.5), ("ess", "upper", 1.0), ("mean_weight", "lower", 0)]
)
def test_bounds_have_the_range_of_what_is_measured(name: str, bound: str, value: float) -> None:
    only = {f"{KEY}.{name}.{key}": None for key in ("lower", "upper", "recovery_lower", "recovery_upper")}
    changes = only | {f"{KEY}.{name}.{bound}": value, f"{KEY}.{name}.recovery_{bound}": value}
    made = config(changes)
    (problem,) = find_problems(made, Composed(made).spec)
    assert problem.key == f"{KEY}.{name}.{bound}"
    assert "so the alarm would always or never fire." in problem.reason
    mended = dict(override.split("=") for override in problem.overrides)
    shipped = {key: DEFAULTS[name][key.rpartition(".")[2]] for key in mended}
    assert found(changes | shipped) == []


def test_an_alarm_that_can_never_fire_is_refused_where_something_hangs_on_it() -> None:
    weight = {"weight": TIS}
    assert found({f"{KEY}.kept_share.action": "warn"}, weight) == []
    (problem,) = found({f"{KEY}.kept_share.action": "stop"}, weight)
    assert "kept_share.action=stop: the correction has no mask and no weight that rejects, so everything is kept." in (
        problem
    )
    assert found({f"{KEY}.kept_share.action": "stop"}) == []


def test_without_rollout_log_probs_nothing_can_stop_the_run() -> None:
    changes = {f"{KEY}.ess.action": "stop", "actor_rollout_ref.rollout.calculate_log_probs": False}
    (problem,) = found(changes, {"weight": None, "masks": {}})
    assert "there is nothing to measure. Set actor_rollout_ref.rollout.calculate_log_probs=true" in problem


def test_an_alarm_on_an_extension_that_is_off_is_not_there() -> None:
    assert "opd_overlap" not in read_settings(config())
    (problem,) = found({f"{KEY}.opd_overlap.action": "stop"})
    assert "with opd=null there is nothing to measure. Set offpolicy.alarms.opd_overlap.action=warn, or off" in problem
    assert found({f"{KEY}.opd_overlap.action": "stop", "opd": {"mode": "loss"}}) == []


# Each alarm looks at a statistic that the correction in force really gives; the five metrics to watch


CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "weight": {"weight": TIS},
    "self-normalised": {"weight": TIS | {"normalize": True}},
    "reuse": {"weight": TIS, "proximal": "reuse"},
    "bypass": {"proximal": "bypass", "masks": {"opsm": opsm(0.1)}},
}
# What each looks at; the others are keep/token_share and nonfinite for all.
LOOKS_AT = {
    "none": ("rollout_ratio/ess", "rollout_ratio/mean", "kl/k3"),
    "weight": ("weight/ess", "weight/mean", "kl/k3"),
    "self-normalised": ("weight/ess", "raw_weight/mean", "kl/k3"),
    "reuse": ("weight/ess", "weight/mean", "kl/k3"),
    "bypass": ("full_ratio/ess", "full_ratio/mean", "full_ratio/chi2"),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_stages_give_what_alarms_look_at(name: str) -> None:
    spec = CorrectionSpec.from_mapping(CORRECTIONS[name])
    looked = tuple(find_statistic(alarm, spec) for alarm in ("ess", "mean_weight", "mismatch_growth"))
    assert looked == LOOKS_AT[name]
    # pi / mu is e^0.3 on one token of two; under bypass pi_old is mu.
    mu = [[-1.0, -1.0]]
    old = mu if name == "bypass" else [[-0.7, -1.0]]
    shown = values(run(spec, mu=mu, old=old, pi=[[-0.7, -1.0]], advantages=-1.0))
    found = {alarm: read_value(alarm, spec, shown) for alarm in DEFAULTS if alarm not in ("kept_share", *OF_EXTENSIONS)}
    assert all(math.isfinite(value) for value in found.values())
    # Two weights 1 and e^0.3 = 1.34986: mean 1.17493, ess (2.34986)^2 / (2 x 2.82212) = 0.97831; normalised the
    # same ess. k3 = (1.34986 - 1 - 0.3) / 2 = 0.02493; chi2 = (2.82212) / 2 - 1 = 0.41106.
    assert found["ess"] == pytest.approx(0.97831, abs=1e-5)
    assert found["mean_weight"] == pytest.approx(1.17493, abs=1e-5)
    assert found["mismatch_growth"] == pytest.approx(0.41106 if name == "bypass" else 0.02493, abs=1e-5)
    assert found["nonfinite"] == 0.0


@pytest.mark.parametrize("off", ["off", False])  # YAML reads a bare off as false
def test_an_alarm_that_is_off_is_not_there(off: Any) -> None:
    assert list(read_settings(config({f"{KEY}.ess.action": off, "opd": {}}))) == [n for n in DEFAULTS if n != "ess"]
    assert found({f"{KEY}.ess.action": off}) == []
