"""Waste: which episodes count, what each token loses, and the gradient of the penalty by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.extensions.process_reward.advantages import token_advantages
from recipe.offpolicy.extensions.process_reward.evidence import check_penalty
from recipe.offpolicy.extensions.process_reward.prefix_scorer import RowValues
from recipe.offpolicy.extensions.process_reward.process_metrics import summarize_waste
from recipe.offpolicy.extensions.process_reward.row_utilities import build_utilities, find_waste
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
    with pytest.raises(LivenessError, match=r"token 2 of sequence 0 loses 0 instead of 0\.5"):
        check_penalty(found, waste, taken, 0.5, MASK)


def test_the_gradient_is_that_of_the_expected_number_of_wasted_episodes() -> None:
    """A policy of three tokens with two choices each; an episode is a token, wasted by a rule of the whole prefix."""
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()

    def log_prob(path: tuple[int, ...]) -> Tensor:
        places = [0, 1 + path[0], 3 + 2 * path[0] + path[1]]
        sign = torch.tensor([1.0 if choice else -1.0 for choice in path], dtype=torch.float64)
        return torch.nn.functional.logsigmoid(sign * logits[places])

    paths = list(itertools.product((0, 1), repeat=3))
    wasted = {path: [path[0] == 1, path[:2] in ((0, 1), (1, 0)), sum(path) == 2] for path in paths}
    count = sum((log_prob(path).sum().exp() * sum(wasted[path]) for path in paths), torch.tensor(0.0).double())
    (expected,) = torch.autograd.grad(-0.3 * count, logits)
    ones = torch.ones(1, 3, dtype=torch.bool)
    found = torch.zeros_like(logits)
    for path in paths:
        each = log_prob(path)
        penalty = 0.3 * torch.tensor([wasted[path]], dtype=torch.float64)
        dealt = token_advantages(penalty * 0, ones, ["a"], ones, normalize="none", penalty=penalty)
        (gradient,) = torch.autograd.grad((each * dealt[0]).sum(), logits)
        found += log_prob(path).sum().exp().detach() * gradient
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
