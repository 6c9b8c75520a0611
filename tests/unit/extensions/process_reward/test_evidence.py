"""The proof: credit that does not reach its tokens, and advantages that change on their way, stop the run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.extensions.process_reward.advantages import token_advantages
from recipe.offpolicy.extensions.process_reward.evidence import (
    build_scored_row,
    check_forward,
    check_moved,
    choose_prefixes,
)
from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.row_utilities import build_utilities
from recipe.offpolicy.proof.verify import LivenessError

MASK = torch.ones(3, 4)
FOUND = build_utilities(
    [
        RowValues(ends=[2, 4], values=[-1.5, -1.0, -1.25]),
        RowValues(ends=[4], values=[-2.0, -0.5]),
        RowValues(ends=[1, 2], values=[-1.0, -1.0, -2.0]),
    ],
    MASK,
)


def deal(values: Tensor) -> Tensor:
    return token_advantages(values, FOUND.positions, ["a", "a", "a"], MASK, normalize="scale")


def test_moved_utilities_change_advantages() -> None:
    """The second row has one episode, and shows nothing."""
    assert check_moved(FOUND, deal, [0, 1, 2]) == 2


def test_an_estimator_that_sums_utilities_stops_the_run() -> None:
    with pytest.raises(LivenessError, match="row 2 was moved to another episode, and no advantage changed"):
        check_moved(FOUND, lambda values: values.sum(-1, keepdim=True) * MASK, [1, 2, 0])


def test_prefixes_are_chosen_of_values_above_the_floor() -> None:
    rows = [RowValues(ends=[1], values=[-1.0, -20.0]), RowValues(error="why"), RowValues(ends=[2], values=[-2.0, -3.0])]
    assert set(choose_prefixes(rows, -20.0, seed=1)) == {(0, 0), (2, 0), (2, 1)}
    many = [RowValues(ends=[1], values=[-1.0, -1.0])] * 9
    assert len(set(choose_prefixes(many, -20.0, seed=1))) == 8


def test_the_row_of_a_prefix_ends_with_force_prompt_and_answer() -> None:
    each = RowValues(ends=[1, 2], values=[-1.0] * 3, answers=[([7, 8], 1), ([7, 8, 9], 2)], best=[0, 1, 1])
    assert build_scored_row(each, 0, [1], [5, 6]) == ([1], [7, 8], 1)
    assert build_scored_row(each, 2, [1], [5, 6]) == ([1], [5, 6, 7, 8, 9], 2)


def test_values_are_compared_with_the_mean_of_the_answers_log_probs() -> None:
    assert check_forward([-1.5, -0.5], [[-9.0, -1.0, -2.0], [-0.46]], [2, 1], 0.05) == pytest.approx(0.04)
    with pytest.raises(LivenessError, match=r"one has a value of -1\.6000 and not -1\.5000 \(allowed: 0\.05 nats\)"):
        check_forward([-1.5, -0.5], [[-9.0, -1.2, -2.0], [-0.5]], [2, 1], 0.05)
    with pytest.raises(LivenessError):
        check_forward([-1.5], [[float("nan")]], [1], 0.05)
