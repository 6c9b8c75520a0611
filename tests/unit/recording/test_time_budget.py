"""What recording may take of each step: no more than its share of the last, and spread evenly where not all fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.recording.recorder import FIRST, MOST_TIME, TimeBudget


def recorded(
    durations: Sequence[float], costs: Sequence[float], *, count: int = 8, updates: int = 1
) -> tuple[list[float], list[list[int]]]:
    """Seconds taken of each step, and the numbers of the micro-batches that were let in.

    Args:
        durations: of each step.
        costs: of one micro-batch of 2 rows, by step.
        count: micro-batches of an update.
    """
    budget, now = TimeBudget(), 100.0
    taken, admitted = [], []
    for step, (duration, cost) in enumerate(zip(durations, costs, strict=True), start=1):
        inside = []
        for update in range(updates):
            budget.begin(step, now, rows=2 * count, updates=updates - update)
            for place in range(count):
                if budget.admits(2):
                    inside.append(update * count + place)
                    budget.spent(cost)
        taken.append(len(inside) * cost)
        admitted.append(inside)
        now += duration
    return taken, admitted


@given(
    durations=st.lists(st.floats(0.1, 1000.0), min_size=3, max_size=12),
    cost=st.floats(1e-5, 2.0),
    count=st.integers(1, 32),
    updates=st.integers(1, 3),
)
def test_no_step_passes_its_share_once_the_cost_is_known(
    durations: list[float], cost: float, count: int, updates: int
) -> None:
    """Of one cost throughout: two measurements, the first in a step of 1 s, and from then on not once."""
    taken, admitted = recorded(durations, [cost] * len(durations), count=count, updates=updates)
    known = 0
    for step, (seconds, inside) in enumerate(zip(taken, admitted, strict=True)):
        allowed = FIRST if step == 0 else MOST_TIME * durations[step - 1]
        if known >= 2 or (known == 1 and step == 0):
            assert seconds <= allowed * (1 + 1e-6)
        else:  # at most the one that was tried stands beyond
            assert seconds <= max(allowed, cost) * (1 + 1e-6)
        known += len(inside)


def test_what_fits_is_recorded_whole() -> None:
    """Eight micro-batches of 0.01 s in steps of 2 s, of which 0.1 s is allowed."""
    _, admitted = recorded([2.0] * 4, [0.01] * 4)
    assert admitted == [list(range(8))] * 4


def test_what_does_not_fit_is_spread_over_the_update() -> None:
    """0.1 s of steps of 2 s take 4 of 8 micro-batches of 0.025 s: no stretch of the update stays unseen."""
    _, admitted = recorded([2.0] * 6, [0.025] * 6)
    for inside in admitted[1:]:
        assert len(inside) == 4
        assert {after - before for before, after in pairwise(inside)} == {2}


def test_each_update_of_a_step_has_its_part() -> None:
    _, admitted = recorded([2.0] * 4, [0.025] * 4, updates=2)
    for inside in admitted[1:]:
        assert [sum(place // 8 == update for place in inside) for update in (0, 1)] == [2, 2]


def test_one_slow_moment_ends_nothing() -> None:
    """A micro-batch of the third step takes 3 s, all others 0.01 s: the rest of that step is left out, and no more."""
    taken, admitted = recorded([10.0] * 6, [0.01, 0.01, 3.0, 0.01, 0.01, 0.01])
    assert list(map(len, admitted)) == [8, 8, 1, 8, 8, 8]
    assert taken[2] == 3.0


def test_a_cost_beyond_every_step_is_tried_twice() -> None:
    _, admitted = recorded([10.0] * 6, [2.0] * 6)
    assert list(map(len, admitted)) == [1, 1, 0, 0, 0, 0]


def test_longer_steps_let_it_in_again() -> None:
    _, admitted = recorded([10.0, 10.0, 10.0, 100.0, 100.0], [2.0] * 5)
    assert list(map(len, admitted)) == [1, 1, 0, 0, 2]


@pytest.mark.parametrize("every", [1, 10])
def test_steps_in_between_count(every: int) -> None:
    """Recorded every tenth step, the time between two recorded ones is that of ten."""
    budget = TimeBudget()
    for number in range(3):
        budget.begin(1 + number * every, number * every * 4.0, rows=2, updates=1)
    assert budget.allowed == pytest.approx(0.2)


def test_a_step_made_anew_keeps_what_is_known() -> None:
    budget = TimeBudget()
    for step, now in ((1, 0.0), (2, 10.0), (1, 11.0)):
        budget.begin(step, now, rows=2, updates=1)
    assert budget.allowed == pytest.approx(0.5)
