"""Before normalisation the coefficient cancels where all rewards are equal; after it, it is a factor."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.extensions.length_penalty.penalties import compare_rewards, compute_shift


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


def test_sessions_outside_of_groups_and_single_ones_are_not_shifted() -> None:
    shift = compute_shift(torch.tensor([0.3, 0.5]).double(), torch.ones(2).double(), {"a": [1]}, by_std=True)
    assert shift.tolist() == [0.0, 0.0]
