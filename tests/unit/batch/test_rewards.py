"""Rewards that are not finite, by sequence."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.batch.rewards import RewardError, check_rewards


def test_finite_rewards_by_token_whose_sum_overflows() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3e38, 3e38]])
    with pytest.raises(RewardError, match=r"the reward of sequence 1 \(prompt b, step 3\) is inf"):
        check_rewards(rewards, ["a", "b"], "step 3")
    check_rewards(rewards[:1], ["a"])
    check_rewards(torch.zeros(0, 5), [])
