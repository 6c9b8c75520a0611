"""Before normalisation the coefficient cancels where all rewards are equal; after it, it is a factor."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.extensions.length_penalty.place import compare_rewards, compute_shift

EIGHT = list(range(400, 1200, 100))


def test_by_hand() -> None:
    """Scores 1, 0, 1, 0: std sqrt(1/3); penalties 0, 0.1, 0.2, 0.1, mean 0.1. The second group has no spread."""
    penalty = torch.tensor([0.0, 0.1, 0.2, 0.1, 0.0, 0.4]).double()
    scores = torch.tensor([1.0, 0, 1, 0, 1, 1]).double()
    groups = {"a": [0, 1, 2, 3], "b": [4, 5]}
    shift = compute_shift(penalty, scores, groups, by_std=True)
    s = (1 / 3) ** 0.5 + 1e-6
    assert shift.tolist() == pytest.approx([-0.1 / s, 0, 0.1 / s, 0, -0.2, 0.2])
    plain = compute_shift(penalty, scores, groups, by_std=False)
    assert plain.tolist() == pytest.approx([-0.1, 0, 0.1, 0, -0.2, 0.2])
    assert compare_rewards(scores, groups) == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3, 1e-5, 2.0**-24, 0.0])
def test_scores_that_nearly_agree_bound_the_shift(gap: float) -> None:
    """One of 4 scores is lower by gap: its own advantage is -0.75 gap / (gap / 2 + 1e-6), about -1.5.

    Penalties are 0.05 from their mean. At a gap of 0.1 they are divided by the deviation of 0.05, below it none exceeds
    the score's own, and within rounding they stay 0.05.
    """
    scores = torch.tensor([1.0 - gap, 1, 1, 1]).double()
    penalty = torch.tensor([0.0, 0.0, 0.1, 0.1]).double()
    shift = compute_shift(penalty, scores, {"a": [0, 1, 2, 3]}, by_std=True)
    wanted = {1e-1: 1.0, 2.0**-24: 0.05, 0.0: 0.05}.get(gap, 0.75 * gap / (gap / 2 + 1e-6))
    assert shift.tolist() == pytest.approx([-wanted, -wanted, wanted, wanted], rel=1e-3)
    assert compare_rewards(scores, {"a": [0, 1, 2, 3]}) == {"a": float(gap > 1e-6)}


def test_coarse_scores_keep_the_bound() -> None:
    """0.001 and 0.00099 in 16 bits: no mean of theirs is one of their numbers."""
    scores = torch.tensor([0.001, 0.00099]).bfloat16()
    shift = compute_shift(torch.tensor([0.05, -0.05]).double(), scores, {"a": [0, 1]}, by_std=True)
    assert float(shift.abs().max()) <= 1.0


def test_sessions_outside_of_groups_and_single_ones_are_not_shifted() -> None:
    shift = compute_shift(torch.tensor([0.3, 0.5]).double(), torch.ones(2).double(), {"a": [1]}, by_std=True)
    assert shift.tolist() == [0.0, 0.0]
