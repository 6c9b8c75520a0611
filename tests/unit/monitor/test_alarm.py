"""An alarm fires after its patience, re-arms inside stricter bounds, and never trusts a NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as draw
from omegaconf import OmegaConf

from recipe.offpolicy.monitor.alarm_settings import AlarmSettings, Band, read_settings
from recipe.offpolicy.monitor.alarms import AlarmState, compute_growth
from tests.support.drawn import examples

SHIPPED = read_settings(OmegaConf.create({"offpolicy": {"alarms": {"ess": {}}}}))["ess"]


def rule(band: Band, recovery: Band, patience: int, recovery_patience: int) -> AlarmSettings:
    return replace(SHIPPED, band=band, recovery=recovery, patience=patience, recovery_patience=recovery_patience)


ESS = rule(Band(0.3, None), Band(0.4, None), 2, 2)


def course(alarm: AlarmSettings, *values: float) -> list[str]:
    """What happened at each value, a letter each: f fired, r recovered, - nothing."""
    state, seen = AlarmState(), []
    for value in values:
        state, event = state.advance(alarm, value)
        seen.append({"none": "-", "fired": "f", "recovered": "r"}[event])
    return ["".join(seen), "firing" if state.firing else "armed"]


def test_a_value_at_the_bound_is_in_order() -> None:
    assert course(ESS, 0.3, 0.3, 0.3) == ["---", "armed"]


def test_two_sides() -> None:
    both = rule(Band(0.5, 2.0), Band(0.6, 1.7), 1, 1)
    assert course(both, 1.0, 2.5, 1.9, 1.5, 0.4, 0.55, 0.6) == ["-f-rf-r", "armed"]
    assert str(both.band) == "[0.5, 2]"
    assert str(Band(None, 0.0)) == "<= 0"


def test_the_values_that_it_counted_are_remembered() -> None:
    state = AlarmState()
    for value in (0.9, 0.2, 0.1):
        state, _ = state.advance(ESS, value)
    assert state.values == (0.2, 0.1)
    for value in range(10):
        state, _ = state.advance(ESS, -float(value))
    assert (state.beyond, state.values) == (12, (-5.0, -6.0, -7.0, -8.0, -9.0))


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
        ([], 7.0, None),  # nothing to compare with
        ([1.0, 1.0], 7.0, None),  # two of three
        ([1.0, 3.0, 2.0], 8.0, 4.0),  # the median is 2
        ([0.0, 0.0, 0.0], 0.004, 4.0),  # a median below 0.001 counts as that
        ([0.0, 0.0, 0.0], 1e-9, 1.0),  # and so does the value
        ([1.0, 1.0, 1.0], math.inf, math.inf),
    ],
)
def test_growth(past: list[float], value: float, expected: float | None) -> None:
    assert compute_growth(past, value, history=3, least=0.001) == pytest.approx(expected)


def test_growth_of_nothing_known_is_not_known() -> None:
    grown = compute_growth([1.0, 1.0, 1.0], math.nan, history=3, least=0.001)
    assert grown is not None
    assert math.isnan(grown)
