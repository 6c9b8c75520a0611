"""The proof: credit that does not reach its tokens, and advantages that change on their way, stop the run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import (
    build_scored_row,
    check_column,
    check_forward,
    check_moved,
    check_related,
)
from recipe.offpolicy.extensions.process_reward.utilities import build_utilities, token_advantages
from recipe.offpolicy.proof.token_alignment import AlignmentChecker, AlignmentError
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
    with pytest.raises(LivenessError, match="sequence 2 was moved to another episode, but no advantage changed"):
        check_moved(FOUND, lambda values: values.sum(-1, keepdim=True) * MASK, [1, 2, 0])


def test_the_row_of_a_prefix_ends_with_force_prompt_and_answer() -> None:
    each = RowValues(ends=[1, 2], values=[-1.0] * 3, answers=[([7, 8], 1), ([7, 8, 9], 2)], best=[0, 1, 1])
    assert build_scored_row(each, 0, [1], [5, 6]) == ([1], [7, 8], 1)
    assert build_scored_row(each, 2, [1], [5, 6]) == ([1], [5, 6, 7, 8, 9], 2)


def test_values_are_compared_with_the_trainers() -> None:
    assert check_forward([-1.5, -0.5], [-1.5, -0.46], 0.05) == pytest.approx(0.04)
    with pytest.raises(LivenessError, match=r"one has the value -1\.6000 instead of -1\.5000 \(allowed: 0\.05 nats\)"):
        check_forward([-1.5, -0.5], [-1.6, -0.5], 0.05)
    with pytest.raises(LivenessError):
        check_forward([-1.5, -0.5], [-1.5, float("nan")], 0.05)


def test_values_that_stand_in_for_log_probs_stop_at_once() -> None:
    """Values at the floor and rows without values tell nothing."""
    rows = [RowValues(ends=[1, 2, 3], values=[-1.0, -20.0, -0.5 - row, -2.0]) for row in range(4)]
    assert not check_column([*rows, RowValues(error="why")], -20.0)
    assert not check_column([RowValues(ends=[1], values=[-20.0, -20.0])] * 8, -20.0)
    assert check_column([RowValues(ends=[1], values=[0.0, -0.0])] * 8, -20.0)
    for values, said in (
        ([-1.5, -1.5], "all 16 values are the placeholder -1.5"),
        ([-1.5, float("nan")], "8 of 16 are not finite"),
        ([-1.5, float("inf")], "8 of 16 are not finite"),
        ([-1.5, 1.5], "the maximum is 1.5, above 0"),
    ):
        with pytest.raises(LivenessError, match=f"values of prefixes .*{said}"):
            check_column([RowValues(ends=[1], values=values)] * 8, -20.0)


def test_older_weights_have_to_rank_prefixes_as_the_trainers_do() -> None:
    generator = torch.Generator().manual_seed(5)
    checker, other = AlignmentChecker(), AlignmentChecker()
    with pytest.raises(LivenessError, match="8 of 8 sequences hold only zeros"):
        check_related([0.0] * 8, [-1.0] * 8, checker)
    for _ in range(40):
        own = -4 * torch.rand(8, generator=generator)
        older = own + 0.5 * torch.randn(8, generator=generator)
        check_related(older.clamp(max=0).tolist(), own.tolist(), checker)
    with pytest.raises(AlignmentError, match="belong to other sequences"):
        draw_values(generator, other)


def draw_values(generator: torch.Generator, checker: AlignmentChecker) -> None:
    for _ in range(40):
        values, own = (-4 * torch.rand(8, generator=generator) for _ in range(2))
        check_related(values.tolist(), own.tolist(), checker)
