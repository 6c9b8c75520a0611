"""What agent loops sent next to rows: refused where it is missing or of other weights, placed at the right tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.utilities import (
    build_utilities,
    check_values,
    move_utility,
    read_values,
)
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
    """Token 2 is a tool's, token 4 does not exist, and two values want one episode."""
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


def test_the_largest_utility_is_moved_to_another_episode() -> None:
    found = build_utilities(ROWS, MASK)
    moved = move_utility(found, 0)
    assert moved is not None
    assert moved[0].tolist() == [0.0, 0.0, 0.0, 0.25]
    assert move_utility(found, 1) is move_utility(found, 2) is None
