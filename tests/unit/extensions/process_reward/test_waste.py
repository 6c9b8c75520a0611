"""Waste: which episodes count, what each token loses, and the gradient of the penalty by enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.prefix_value_rewards import check_penalty
from recipe.offpolicy.extensions.process_reward.utilities import (
    build_utilities,
    find_waste,
    summarize_waste,
    token_advantages,
)
from recipe.offpolicy.proof.verify import LivenessError

FLOOR = -20.0
ROWS = [
    RowValues([2, 5, 6], [-1.5, -1.5, -0.5, -0.495]),  # 0, 1 and 0.005
    RowValues([1, 4], [FLOOR, FLOOR, -3.0]),  # unknown, and 17
    RowValues([]),
]
MASK = torch.arange(6) < torch.tensor([6, 4, 3])[:, None]


def test_waste_by_hand() -> None:
    found = build_utilities(ROWS, MASK)
    waste = find_waste(found, 0.01, FLOOR)
    assert waste.nonzero().tolist() == [[0, 1], [0, 5]]
    assert find_waste(found, 0.0, FLOOR).nonzero().tolist() == [[0, 1]]
    metrics = summarize_waste(found, waste)
    # Two of five episodes, with 2 and 1 of 10 tokens.
    assert (metrics["waste/share"], metrics["waste/token_share"]) == (0.4, 0.3)
    empty = build_utilities([RowValues([])], MASK[:1])
    assert math.isnan(summarize_waste(empty, find_waste(empty, 0.0, FLOOR))["waste/share"])


@pytest.mark.parametrize("normalize", ["zscore", "scale", "none"])
def test_tokens_lose_the_penalty_of_later_wasted_episodes(normalize: str) -> None:
    found = build_utilities(ROWS, MASK)
    waste = find_waste(found, 0.01, FLOOR)
    plain, lowered = (
        token_advantages(
            found.values.double(), found.positions, ["a"] * 3, MASK, normalize=normalize, penalty=each * waste.double()
        )
        for each in (0.0, 0.5)
    )
    taken = plain - lowered
    assert taken[0].tolist() == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5, 0.5])
    assert not taken[1:].any()
    check_penalty(found, waste, taken, 0.5, MASK)
    taken[0, 2:] = 0.0
    with pytest.raises(LivenessError, match=r"the advantage of token 2 of sequence 0 by 0 instead of 0\.5"):
        check_penalty(found, waste, taken, 0.5, MASK)
