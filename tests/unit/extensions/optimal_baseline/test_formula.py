"""The baseline against a float64 loop, its variance by enumeration, and its bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.optimal_baseline import compute_advantages, find_difference

GROUPS = st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1e6) | st.just(5e-324)), min_size=1, max_size=9)
LEAVE_ONE_OUT = pytest.mark.parametrize("leave_one_out", [False, True])


def state(rewards: list[float], energy: list[float], leave_one_out: bool) -> list[float]:
    found = []
    for i, reward in enumerate(rewards):
        pairs = [(e, r) for j, (e, r) in enumerate(zip(energy, rewards, strict=True)) if j != i or not leave_one_out]
        whole = sum(e for e, _ in pairs)
        found.append(reward - sum(e / whole * r for e, r in pairs) if whole > 0 else 0.0)
    return found


@LEAVE_ONE_OUT
@given(group=GROUPS)
def test_it_is_the_loop_in_float64(leave_one_out: bool, group: list[tuple[float, float]]) -> None:
    rewards, energy = (list(column) for column in zip(*group, strict=True))
    found = compute_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(energy, dtype=torch.float64),
        leave_one_out=leave_one_out,
    )
    assert find_difference(found.tolist(), rewards, energy, leave_one_out=leave_one_out) is None
    if max(energy) > 1e-300 and not leave_one_out:
        assert found.tolist() == pytest.approx(state(rewards, energy, leave_one_out), abs=1e-11)


@pytest.mark.parametrize(
    ("rewards", "energy", "of_group", "of_others"),
    [
        ([1.0, 0.0, 0.0], [1.0, 2.0, 1.0], [0.75, -0.25, -0.25], [1.0, -0.5, -1 / 3]),
        ([3.0], [2.0], [0.0], [0.0]),
        ([1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([1.0, 0.0], [5e-324, 0.0], [0.0, -1.0], [0.0, -1.0]),
        ([0.1, 0.1, 0.1], [0.3, 1e-12, 7.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
)
def test_by_hand(rewards: list[float], energy: list[float], of_group: list[float], of_others: list[float]) -> None:
    given = torch.tensor(rewards).double(), torch.tensor(energy, dtype=torch.float64)
    assert compute_advantages(*given, leave_one_out=False).tolist() == pytest.approx(of_group)
    assert compute_advantages(*given, leave_one_out=True).tolist() == pytest.approx(of_others)
