"""Weights that come late are told from two engines' mismatch, within five steps, and once."""

from __future__ import annotations

import math

import pytest

from recipe.offpolicy.monitor.mismatch.late_weights import UPDATES, LateWeightsWatch, find_lag


def warned(*k3: float, stale: float = 0.0) -> list[int]:
    """The updates, from 1 on, at which the watch warned."""
    watch = LateWeightsWatch()
    found = [watch.see({"kl/k3": each, "staleness/max": stale}) for each in k3]
    return [number for number, each in enumerate(found, start=1) if each]


def test_a_lag_is_said_at_the_third_step_and_once(caplog: pytest.LogCaptureFixture) -> None:
    """What a lag of eight updates looks like: in step at first, for the first weights are everywhere."""
    assert warned(6e-5, 0.36, 0.45, 0.7, 0.6) == [3]
    (record,) = caplog.records
    assert "weights lag: mu and pi_old differ by k3 = 0.45" in record.message
    assert "6e-05 at the first update" in record.message


def test_the_mismatch_of_two_engines_is_no_lag() -> None:
    assert warned(*[2e-3] * 8) == []
    assert warned(1e-4, *[1.5e-3] * 7) == []  # more than ten times as much, and still little
    assert warned(1e-2, *[0.15] * 7) == []
    assert warned(0.0, 0.4, 1e-4, 0.4, 1e-4) == []  # now and then


def test_late_updates_and_rows_that_verl_calls_stale_say_nothing() -> None:
    assert warned(*[1e-4] * UPDATES, 0.5, 0.5, 0.5) == []
    assert warned(1e-4, 0.5, 0.5, 0.5, stale=2.0) == []
    watch = LateWeightsWatch()
    assert not any(watch.see(values) for values in ({}, {"kl/k3": math.nan}, {"kl/k3": 0.1}, {"kl/k3": 0.2}))


def test_a_lag_is_that_of_the_weights_nearest_to_mu() -> None:
    assert find_lag([0.4, 0.3, 1e-5, 0.2]) == 2
    assert find_lag([2e-3, 0.3, 0.4]) == 0  # two engines, in step
    assert find_lag([0.1]) == 0
    assert find_lag([0.30, 0.28, 0.29]) is None  # mu is of neither
    assert find_lag([0.3, math.nan]) is None
