"""verl's mean over a mini-batch, taken in one of its micro-batches, and rewards that are not finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from recipe.offpolicy.batch.mini_batch_mean import mini_batch_mean
from recipe.offpolicy.batch.safe_values import RewardError, check_rewards
from verl.utils import tensordict_utils as tu

VALUES = torch.tensor([[1.0, 2.0], [4.0, 100.0]])
MASK = torch.tensor([[True, True], [True, False]])


def mean(mode: str, mask: torch.Tensor = MASK, tokens: int = 14) -> float:
    data = TensorDict({}, batch_size=2)
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=tokens, global_batch_size=7)
    config = SimpleNamespace(loss_agg_mode=mode, loss_scale_factor=None)
    return mini_batch_mean(VALUES, mask, config, data).item()


def test_denominators_are_the_mini_batchs_over_all_ranks() -> None:
    # The three values are 7 in sum; ranks are averaged afterwards, so that the share of one counts twice.
    assert mean("token-mean") == pytest.approx(7 / 14 * 2)
    assert mean("seq-mean-token-sum") == pytest.approx(7 / 7 * 2)
    # Rows have the means 1.5 and 4.
    assert mean("seq-mean-token-mean") == pytest.approx(5.5 / 7 * 2)


def test_a_mini_batch_without_a_token_has_the_mean_zero() -> None:
    assert mean("token-mean", torch.zeros_like(MASK), tokens=0) == 0.0


def test_finite_rewards_by_token_whose_sum_overflows() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3e38, 3e38]])
    with pytest.raises(RewardError, match=r"the reward of sequence 1 \(prompt b, step 3\) is inf"):
        check_rewards(rewards, ["a", "b"], "step 3")
    check_rewards(rewards[:1], ["a"])
    check_rewards(torch.zeros(0, 5), [])
