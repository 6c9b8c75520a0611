"""Alarms: when they fire and re-arm, and their effect: a warning, the end of the run, or a fallback and the return from
it.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as draw
from omegaconf import OmegaConf

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.monitor.alarm_settings import DEFAULTS, AlarmSettings, Band, read_settings
from recipe.offpolicy.monitor.alarms import CONFIGURED, AlarmError, Alarms, AlarmState, compute_growth
from tests.support.corrections import GSM, TIS
from tests.support.drawn import examples

SPEC = CorrectionSpec.from_mapping({"weight": TIS})
SAFER = CorrectionSpec.from_mapping({"masks": {"gsm": GSM}})
FALLBACK = {"options": ["gsm"], "correction": SAFER.to_mapping()}
HEALTHY = {
    "weight/ess": 0.9,
    "weight/mean": 1.0,
    "rollout_ratio/ess": 0.9,
    "rollout_ratio/mean": 1.0,
    "keep/token_share": 1.0,
    "nonfinite/rollout_log_prob": 0.0,
    "kl/k3": 1e-3,
}


def panel(**alarms: dict[str, Any]) -> Alarms:
    """All alarms off, except the given ones with their keys."""
    values = {name: {"action": "off"} for name in DEFAULTS} | alarms
    return Alarms(OmegaConf.create({"offpolicy": {"alarms": values}}))


def judged(made: Alarms, *ess: float, **others: float) -> list[bool]:
    """Return whether each update changed the active correction; ESS is the same by weight and by ratio."""
    seen = []
    for value in ess:
        shown = HEALTHY | {"weight/ess": value, "rollout_ratio/ess": value} | others
        seen.append(made.judge(made.fallback or SPEC, shown))
    return seen


@pytest.mark.parametrize(
    ("name", "beyond"),
    [
        ("ess", {"weight/ess": 0.29}),
        ("mean_weight", {"weight/mean": 2.1}),
        ("nonfinite", {"nonfinite/rollout_log_prob": 1.0}),
        ("mismatch_growth", {"kl/k3": 5.1e-3}),
    ],
)
def test_by_default_each_warns(name: str, beyond: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    made = Alarms(OmegaConf.create({"offpolicy": {"alarms": {alarm: {} for alarm in DEFAULTS}}}))
    for _ in range(16):  # what growth is seen against
        made.judge(SPEC, HEALTHY)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not made.judge(SPEC, HEALTHY | beyond)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"alarm {name}: " in caplog.text
    assert {key for key, value in made.metrics().items() if value} == {f"alarm/{name}"}


def test_stop_names_alarm_statistic_values_bound_updates_and_what_to_do() -> None:
    made = panel(ess={"action": "stop", "patience": 2})
    judged(made, 0.9, 0.25)
    said = r"alarm ess: weight/ess was 0\.25, 0\.125 in 2 consecutive updates, up to update 3 of the run, .* >= 0\.3: "
    with pytest.raises(AlarmError, match=f"{said}.*ess.action=stop ends the run.*resume_changed_correction=true"):
        judged(made, 0.125)


def test_a_fallback_is_in_force_from_the_next_update_on(caplog: pytest.LogCaptureFixture) -> None:
    made = panel(ess={"action": "fallback", "fallback": FALLBACK, "patience": 2})
    assert (made.in_force, made.fallback) == (CONFIGURED, None)
    with caplog.at_level(logging.WARNING):
        assert judged(made, 0.2, 0.2) == [False, True]
    assert (made.in_force, made.fallback) == ("ess", SAFER)
    assert (
        "fallback [gsm] is active from the next update, which must prove it live, and remains active for the rest"
        in caplog.text
    )
    assert made.metrics() == {"alarm/ess": 1.0, "alarm/active_correction": 0.0}
    # It re-arms and fires again: there is nothing further to fall back to.
    assert judged(made, 0.5, 0.5, 0.5, 0.2, 0.2, 0.2) == [False] * 6
    assert made.in_force == "ess"
    assert made.metrics() == {"alarm/ess": 1.0, "alarm/active_correction": 1.0}
    assert "the fallback of alarm ess is already active, and stays active" in caplog.text


def test_it_comes_back_after_quiet_updates(caplog: pytest.LogCaptureFixture) -> None:
    alarm = {"patience": 1, "recovery_patience": 2, "return_after": 3}
    made = panel(ess=alarm | {"action": "fallback", "fallback": FALLBACK})
    assert judged(made, 0.2) == [True]
    with caplog.at_level(logging.WARNING):
        # 0.35 is not inside the stricter bound, and the count begins again.
        assert judged(made, 0.5, 0.5, 0.35, 0.5, 0.5) == [False] * 5
        assert judged(made, 0.5) == [True]
    assert (made.in_force, made.fallback) == (CONFIGURED, None)
    assert "quiet for 3 updates, the configured correction is active again" in caplog.text
    # And it can fall back again, at once: its patience is one update.
    assert judged(made, 0.2) == [True]


LASTING = {"action": "fallback", "fallback": FALLBACK, "window": 4, "patience": 2, "recovery_patience": 2}


def test_a_mismatch_that_stays_high_keeps_its_fallback() -> None:
    """Neither a switch nor time makes a fault the reference; that would be a recovery without evidence."""
    made = panel(mismatch_growth=LASTING | {"return_after": 3})
    judged(made, *[0.9] * 8)
    assert judged(made, *[0.9] * 60, **{"kl/k3": 0.1}) == [False, True] + [False] * 58
    # Inside the band and not inside the stricter one, 3 times the median: it fires on, and does not learn that either.
    assert judged(made, *[0.9] * 20, **{"kl/k3": 3e-3}) == [False] * 20
    assert made.metrics()["alarm/mismatch_growth"] == 1.0
    assert judged(made, *[0.9] * 3) == [False, False, True]
    assert made.in_force == CONFIGURED


# Two alarms -------------------------------------------------------------------------------------------------

# Checkpoints ------------------------------------------------------------------------------------------------


def test_everything_survives_a_checkpoint() -> None:
    alarms: dict[str, Any] = {
        "ess": {"action": "fallback", "fallback": FALLBACK, "patience": 1, "recovery_patience": 2, "return_after": 3},
        "mismatch_growth": {"window": 3, "patience": 3},
    }
    whole = panel(**alarms)
    sequence = [0.9, 0.2, 0.5, 0.5, 0.5, 0.2, 0.9]
    expected = judged(whole, *sequence)
    for place in range(len(sequence)):
        before, after = panel(**alarms), panel(**alarms)
        seen = judged(before, *sequence[:place])
        after.restore(json.loads(json.dumps(before.state())))
        assert after.in_force == before.in_force
        assert seen + judged(after, *sequence[place:]) == expected
        assert after.state() == whole.state()
    assert expected == [False, True, False, False, True, True, False]


CHANGED: dict[str, dict[str, Any]] = {
    "action": {"action": "fallback", "fallback": FALLBACK, "patience": 2},
    "patience": {"action": "warn", "patience": 1},
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_alarm_that_is_configured_otherwise_begins_anew(name: str, caplog: pytest.LogCaptureFixture) -> None:
    before, after = panel(ess={"action": "warn", "patience": 2}), panel(ess=CHANGED[name])
    judged(before, 0.1, 0.1)
    assert before.metrics()["alarm/ess"] == 1.0
    with caplog.at_level(logging.WARNING):
        after.restore(json.loads(json.dumps(before.state())), in_force=CONFIGURED)
    assert "alarm ess: it was firing at the checkpoint, and is reset because its settings have changed." in caplog.text
    assert after.metrics()["alarm/ess"] == 0.0
    switched = judged(after, 0.1, 0.1)
    assert after.metrics()["alarm/ess"] == 1.0
    assert switched == [False, name == "action"]


SHIPPED = read_settings(OmegaConf.create({"offpolicy": {"alarms": {"ess": {}}}}))["ess"]


def rule(band: Band, recovery: Band, patience: int, recovery_patience: int) -> AlarmSettings:
    return replace(SHIPPED, band=band, recovery=recovery, patience=patience, recovery_patience=recovery_patience)


@examples
@given(draw.lists(draw.sampled_from([0.1, 0.35, 0.5, math.nan]), max_size=40), draw.integers(1, 4), draw.integers(1, 4))
def test_firing_and_re_arming_take_turns_and_their_time(values: list[float], patience: int, recovery: int) -> None:
    alarm = rule(Band(0.3, None), Band(0.4, None), patience, recovery)
    state, events = AlarmState(), []
    for place, value in enumerate(values):
        state, event = state.advance(alarm, value)
        if event != "none":
            events.append(event)
        if event == "fired":
            assert all(not v >= 0.3 for v in values[place + 1 - patience : place + 1])
            assert place + 1 >= patience
        if event == "recovered":
            assert all(v >= 0.4 for v in values[place + 1 - recovery : place + 1])
    assert events[::2] == ["fired"] * len(events[::2])
    assert events[1::2] == ["recovered"] * len(events[1::2])
    assert state.firing == (len(events) % 2 == 1)


@pytest.mark.parametrize(
    ("past", "value", "expected"),
    [
        ([1.0, 1.0], 7.0, None),  # two of three
        ([1.0, 3.0, 2.0], 8.0, 4.0),  # the median is 2
        ([0.0, 0.0, 0.0], 0.004, 4.0),  # a median below 0.001 counts as that
    ],
)
def test_growth(past: list[float], value: float, expected: float | None) -> None:
    assert compute_growth(past, value, history=3, least=0.001) == pytest.approx(expected)
