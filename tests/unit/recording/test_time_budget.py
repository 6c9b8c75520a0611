"""What recording may take of each step: no more than its share of the last, and spread evenly where not all fits."""

from __future__ import annotations

from collections.abc import Sequence

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


def test_each_update_of_a_step_has_its_part() -> None:
    _, admitted = recorded([2.0] * 4, [0.025] * 4, updates=2)
    for inside in admitted[1:]:
        assert [sum(place // 8 == update for place in inside) for update in (0, 1)] == [2, 2]


@pytest.mark.parametrize("every", [1, 10])
def test_steps_in_between_count(every: int) -> None:
    """Recorded every tenth step, the time between two recorded ones is that of ten."""
    budget = TimeBudget()
    for number in range(3):
        budget.begin(1 + number * every, number * every * 4.0, rows=2, updates=1)
    assert budget.allowed == pytest.approx(0.2)
