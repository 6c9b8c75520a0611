"""What is configured under offpolicy.alarms, and what each mistake is told."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.monitor.alarms.alarm_settings import DEFAULTS, Band, find_problems, read_settings
from recipe.offpolicy.preflight.composed import Composed
from tests.support.applications import CONFIGS
from tests.support.corrections import GSM, TIS

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


def test_what_is_shipped_is_what_is_taken_by_default() -> None:
    shipped: Any = OmegaConf.to_container(config().offpolicy.alarms)
    assert shipped == dict(DEFAULTS)
    assert list(shipped) == list(DEFAULTS)
    assert found({}) == []


def test_defaults_are_those_of_practice() -> None:
    alarms = read_settings(config({"opd": {"mode": "loss"}}))
    assert {name: alarm.action for name, alarm in alarms.items()} == dict.fromkeys(DEFAULTS, "warn")
    assert alarms["opd_overlap"].rule.band == Band(None, 0.5)
    assert alarms["ess"].rule.band == Band(0.3, None)
    assert alarms["mean_weight"].rule.band == Band(0.5, 2.0)
    assert alarms["nonfinite"].rule.band == Band(None, 0.0)


@pytest.mark.parametrize("off", ["off", False])  # YAML reads a bare off as false
def test_an_alarm_that_is_off_is_not_there(off: Any) -> None:
    assert list(read_settings(config({f"{KEY}.ess.action": off, "opd": {}}))) == [n for n in DEFAULTS if n != "ess"]
    assert found({f"{KEY}.ess.action": off}) == []


ESS, MEAN = f"{KEY}.ess", f"{KEY}.mean_weight"
BACK = {f"{ESS}.action": "fallback", f"{ESS}.fallback": ["gsm"]}
SHIPPED = (f"{ESS}.lower=0.3", f"{ESS}.upper=null", f"{ESS}.recovery_lower=0.4", f"{ESS}.recovery_upper=null")
WRONG: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "section": ({KEY: None}, KEY, ()),
    "name": ({f"{KEY}.entropy": {"action": "warn"}}, f"{KEY}.entropy", ()),
    "null": ({ESS: None}, ESS, (f"{ESS}={{action: 'off'}}",)),
    "an action": ({ESS: "stop"}, ESS, (f"{ESS}={{action: 'stop'}}",)),
    "open": ({f"{ESS}.lower": None, f"{ESS}.recovery_lower": None}, f"{ESS}.lower", SHIPPED),
    "inverted": ({f"{ESS}.upper": 0.2, f"{ESS}.recovery_upper": 0.1}, f"{ESS}.lower", SHIPPED),
    "half": ({f"{ESS}.recovery_lower": None}, f"{ESS}.recovery_lower", (f"{ESS}.recovery_lower=0.3",)),
    "looser below": ({f"{ESS}.recovery_lower": 0.2}, f"{ESS}.recovery_lower", (f"{ESS}.recovery_lower=0.3",)),
    "looser above": ({f"{MEAN}.recovery_upper": 2.5}, f"{MEAN}.recovery_upper", (f"{MEAN}.recovery_upper=2.0",)),
    "nothing": ({f"{ESS}.action": "fallback"}, f"{ESS}.fallback", (f"{ESS}.fallback=[tis_token, gsm]",)),
    "not taken": ({f"{ESS}.fallback": ["gsm"]}, f"{ESS}.fallback", (f"{ESS}.action=fallback",)),
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
    ("name", "bound", "value", "said"),
    [
        ("kept_share", "lower", 1.5, "it is in [0, 1]: every value is beyond, so it always fires."),
        ("kept_share", "lower", 0.0, "no value is beyond, so it never fires."),
        ("ess", "lower", -3, "it is in [0, 1]: no value is beyond, so it never fires."),
        ("ess", "upper", 1.0, "no value is beyond, so it never fires."),
        ("ess", "upper", -0.1, "every value is beyond, so it always fires."),
        ("mean_weight", "lower", 0, "it is >= 0: no value is beyond, so it never fires."),
        ("nonfinite", "upper", -1, "every value is beyond, so it always fires."),
    ],
)
def test_bounds_have_the_range_of_what_is_measured(name: str, bound: str, value: float, said: str) -> None:
    only = {f"{KEY}.{name}.{key}": None for key in ("lower", "upper", "recovery_lower", "recovery_upper")}
    changes = only | {f"{KEY}.{name}.{bound}": value, f"{KEY}.{name}.recovery_{bound}": value}
    made = config(changes)
    (problem,) = find_problems(made, Composed(made).spec)
    assert problem.key == f"{KEY}.{name}.{bound}"
    assert said in problem.reason
    mended = dict(override.split("=") for override in problem.overrides)
    shipped = {key: DEFAULTS[name][key.rpartition(".")[2]] for key in mended}
    assert found(changes | shipped) == []


@pytest.mark.parametrize(("name", "bound", "value"), [("kept_share", "lower", 1.0), ("ess", "lower", 0.01)])
def test_bounds_at_the_edge_of_the_range_can_act(name: str, bound: str, value: float) -> None:
    assert found({f"{KEY}.{name}.{bound}": value, f"{KEY}.{name}.recovery_{bound}": value}) == []


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


def test_names_that_nobody_resolved_are_not_taken_for_a_correction() -> None:
    with pytest.raises(SpecError, match="main_offpolicy has not replaced"):
        read_settings(config({f"{KEY}.ess.action": "fallback", f"{KEY}.ess.fallback": ["gsm"]}))
