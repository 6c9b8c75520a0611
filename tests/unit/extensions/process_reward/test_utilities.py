"""Utilities of episodes: their positions, the advantages and metrics computed from them, and the proof."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import (
    build_scored_row,
    check_moved,
    check_related,
)
from recipe.offpolicy.extensions.process_reward.utilities import (
    build_utilities,
    check_values,
    compute_covered,
    find_waste,
    read_values,
    summarize_advantages,
    summarize_cost,
    summarize_values,
    summarize_waste,
    token_advantages,
)
from recipe.offpolicy.proof.token_alignment import AlignmentChecker, AlignmentError
from recipe.offpolicy.proof.verify import LivenessError

MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
ROWS = [
    RowValues(ends=[2, 4], values=[-1.5, -1.0, -1.25], version=4),
    RowValues(ends=[1], values=[-2.0, -0.5], version=4),
    RowValues(error="no answer"),
]


def test_utilities_stand_at_the_last_token_of_their_episode() -> None:
    found = build_utilities(ROWS, MASK)
    assert found.values.tolist() == [[0.0, 0.5, 0.0, -0.25], [1.5, 0.0, 0.0, 0.0], [0.0] * 4]
    assert found.positions.tolist() == [[False, True, False, True], [True, False, False, False], [False] * 4]
    assert found.scored.tolist() == [True, True, False]
    assert found.telescope_error < 1e-6


@pytest.mark.parametrize("ends", [[2, 3], [2, 5], [2]])
def test_values_that_do_not_fit_a_row_were_mixed_up(ends: list[int]) -> None:
    """Token 2 is a tool's, token 4 does not exist, and two values claim the same episode."""
    with pytest.raises(LivenessError, match=r"sequence 0 .* mixed up"):
        build_utilities([RowValues(ends=ends, values=[-1.0, -1.0, -1.0])], MASK[:1])


def test_rows_past_the_agent_loops_that_score_stop_the_run() -> None:
    with pytest.raises(LivenessError, match=r"1 of 2 sequences have no values .*the first is sequence 1"):
        read_values([{"ends": [1], "values": [0.0, 0.0]}, None])
    assert read_values([{"ends": [], "values": [], "error": "why", "more": 1}]) == [RowValues(error="why")]


def check(rows: list[RowValues], versions: list[Any], **changed: Any) -> None:
    check_values(rows, versions, **({"expected": 4, "max_unscored_share": 0.0} | changed))


def test_values_have_to_be_of_the_weights_that_sampled_the_row() -> None:
    check(ROWS[:2], [4, None])
    with pytest.raises(LivenessError, match=r"sequence 1 was sampled by version 5 .* values have version 4"):
        check(ROWS[:2], [4, 5])
    with pytest.raises(LivenessError, match="sampled by version 5: the engine was not synchronised"):
        check(ROWS[:2], [4, 4], expected=5)
    check(ROWS[:2], [4, 4], expected=None)


def test_rows_without_values_stop_above_the_share_with_their_reason() -> None:
    with pytest.raises(LivenessError, match=r"1 of 3 sequences were not scored\. Sequence 2: no answer"):
        check(ROWS, [4, 4, 4], max_unscored_share=0.33)
    check(ROWS, [4, 4, 4], max_unscored_share=0.34)


# Utilities telescope; process advantages by hand, and what normalising by group does to them


U = torch.tensor([[9.0, 0.2, 9.0, -0.1], [9.0, 0.4, 9.0, 9.0]])
AT = torch.tensor([[False, True, False, True], [False, True, False, False]])
TELESCOPE_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("normalize", "first", "second"),
    [
        ("zscore", [-0.927, -0.927, -1.060, -1.060], 0.927),  # mean 0.1667, std 0.2517
        ("scale", [0.378, 0.378, -0.378, -0.378], 1.512),  # root mean square sqrt(0.07)
        ("none", [0.1, 0.1, -0.1, -0.1], 0.4),
    ],
)
def test_utilities_of_a_group_by_hand(normalize: str, first: list[float], second: float) -> None:
    """0.2, -0.1 and 0.4: ``zscore`` punishes progress that is slower than its siblings', ``scale`` keeps its sign."""
    found = token_advantages(U, AT, ["a", "a"], TELESCOPE_MASK, normalize=normalize)
    assert found[0].tolist() == pytest.approx(first, abs=5e-4)
    assert found[1].tolist() == pytest.approx([second, second, 0.0, 0.0], abs=5e-4)


def test_tokens_off_the_mask_pass_credit_on_and_get_none() -> None:
    """A tool's tokens are in the middle of the row."""
    u, at = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.tensor([[False, False, False, True]])
    found = token_advantages(u, at, ["a"], torch.tensor([[1, 0, 0, 1]]), normalize="none")
    assert found.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_a_utility_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="token 1 of row 0"):
        token_advantages(torch.where(AT, math.nan, U), AT, ["a", "a"], TELESCOPE_MASK, normalize="scale")


# Metrics of values, cost and advantages by hand


COST_ROWS = [
    RowValues(ends=[2, 4], values=[-1.5, -1.0, -0.5], requests=3, forward=30, cached=10, began=11.0, ended=13.0),
    RowValues(ends=[1], values=[-2.0, -3.0], requests=3, forward=20, rescored=1, began=12.0, ended=14.0),
    RowValues(error="why"),
]


def test_metrics_of_values() -> None:
    found = summarize_values(build_utilities(COST_ROWS, torch.ones(3, 4)), torch.tensor([1.0, 0.0, 1.0]))
    assert (found["episodes/mean"], found["episodes/max"], found["unscored_rows"]) == (1.5, 2.0, 1.0)
    assert (found["value/first/mean"], found["value/first/passed"]) == (-1.75, -1.5)
    assert (found["value/last/passed"], found["value/last/failed"], found["value/separation"]) == (-0.5, -3.0, 1.0)
    assert found["utility/mean"] == pytest.approx(0.0)
    assert found["utility/positive_share"] == pytest.approx(2 / 3)


def test_cost_is_the_time_in_which_anything_is_scored() -> None:
    found = summarize_cost(COST_ROWS, began=8.0)
    assert (found["cost/seconds"], found["cost/share_of_rollout"]) == (3.0, 0.5)
    assert (found["cost/requests"], found["cost/forward_tokens"], found["cost/rescored"]) == (6.0, 50.0, 1.0)
    assert found["cost/cached_share"] == pytest.approx(10 / 60)
    assert math.isnan(summarize_cost(COST_ROWS, None)["cost/share_of_rollout"])
    assert compute_covered([]) == 0.0


# Waste: which episodes count, what each token loses, and the gradient of the penalty by enumeration


# The proof: credit that does not reach its tokens, and advantages that change on their way, stop the run


FULL = torch.ones(3, 4)
FOUND = build_utilities(
    [
        RowValues(ends=[2, 4], values=[-1.5, -1.0, -1.25]),
        RowValues(ends=[4], values=[-2.0, -0.5]),
        RowValues(ends=[1, 2], values=[-1.0, -1.0, -2.0]),
    ],
    FULL,
)


def deal(values: Tensor) -> Tensor:
    return token_advantages(values, FOUND.positions, ["a", "a", "a"], FULL, normalize="scale")


def test_moved_utilities_change_advantages() -> None:
    """The second row has one episode, so it shows nothing."""
    assert check_moved(FOUND, deal, [0, 1, 2]) == 2


def test_an_estimator_that_sums_utilities_stops_the_run() -> None:
    with pytest.raises(LivenessError, match="sequence 2 to another episode changed no advantage"):
        check_moved(FOUND, lambda values: values.sum(-1, keepdim=True) * FULL, [1, 2, 0])


def test_the_row_of_a_prefix_ends_with_force_prompt_and_answer() -> None:
    each = RowValues(ends=[1, 2], values=[-1.0] * 3, answers=[([7, 8], 1), ([7, 8, 9], 2)], best=[0, 1, 1])
    assert build_scored_row(each, 0, [1], [5, 6]) == ([1], [7, 8], 1)
    assert build_scored_row(each, 2, [1], [5, 6]) == ([1], [5, 6, 7, 8, 9], 2)


def test_older_weights_have_to_rank_prefixes_as_the_trainers_do() -> None:
    generator = torch.Generator().manual_seed(5)
    checker, other = AlignmentChecker(), AlignmentChecker()
    with pytest.raises(LivenessError, match="8 of 8 sequences contain only zeros"):
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


def test_the_share_of_the_process_part_counts_response_tokens() -> None:
    process, outcome = torch.tensor([[1.0, -1.0, 9.0]]), torch.tensor([[2.0, 4.0, 9.0]])
    found = summarize_advantages(outcome, process, torch.tensor([[1, 1, 0]]))
    assert found["advantage/share"] == pytest.approx(2 / 8)
    assert found["advantage/outcome_std"] == found["advantage/process_std"] == pytest.approx(math.sqrt(2))


def test_waste_by_hand() -> None:
    """Utilities 0, 1 and 0.005; an episode between two values at the floor is unknown."""
    rows = [RowValues([2, 5, 6], [-1.5, -1.5, -0.5, -0.495]), RowValues([1, 4], [-20.0, -20.0, -3.0])]
    found = build_utilities(rows, torch.arange(6) < torch.tensor([6, 4])[:, None])
    assert find_waste(found, 0.01, -20.0).nonzero().tolist() == [[0, 1], [0, 5]]
    assert find_waste(found, 0.0, -20.0).nonzero().tolist() == [[0, 1]]
    # Two of five episodes, with 2 and 1 of 10 tokens.
    metrics = summarize_waste(found, find_waste(found, 0.01, -20.0))
    assert (metrics["waste/share"], metrics["waste/token_share"]) == (0.4, 0.3)
