"""verl's mean over a mini-batch, taken in one of its micro-batches, and rewards that are not finite."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from recipe.offpolicy.batch.plan import add_shares, check_shares, defer_shares, mini_batch_mean
from recipe.offpolicy.batch.seals import LivenessError
from recipe.offpolicy.correction.statistics import fetch
from recipe.offpolicy.proof.rewards import RewardError, check_rewards
from verl.utils import tensordict_utils as tu

VALUES = torch.tensor([[1.0, 2.0], [4.0, 100.0]])
MASK = torch.tensor([[True, True], [True, False]])


def mean(mode: str, mask: torch.Tensor = MASK, tokens: int = 14) -> float:
    data = TensorDict({}, batch_size=2)
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=tokens, global_batch_size=7)
    config = SimpleNamespace(loss_agg_mode=mode, loss_scale_factor=None)
    return mini_batch_mean(VALUES, mask, config, data).item()


def test_a_mini_batch_without_a_token_has_the_mean_zero() -> None:
    assert mean("token-mean", torch.zeros_like(MASK), tokens=0) == 0.0


@given(
    mini_batches=st.lists(
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4), max_size=3
    ),
    factor=st.sampled_from([0.5, 2, 3, 1.01, 0]),
    wrong=st.sampled_from(["batch_num_tokens", "global_batch_size"]),
)
def test_micro_batches_fill_each_denominator_once_a_step(
    mini_batches: list[list[list[int]]], factor: float, wrong: str
) -> None:
    """Lists of mini-batches, of their micro-batches over all ranks, and of the lengths of their rows."""

    def fill(scale: float) -> dict[str, float]:
        deferred = []
        for micro_batches in mini_batches:
            sums = {
                "batch_num_tokens": sum(map(sum, micro_batches)),
                "global_batch_size": sum(map(len, micro_batches)),
            }
            for lengths in micro_batches:
                data = TensorDict({}, batch_size=len(lengths))
                tu.assign_non_tensor(data, **sums | {wrong: sums[wrong] * scale})
                deferred.append(defer_shares(torch.arange(5) < torch.tensor(lengths)[:, None], data))
        return add_shares(fetch(deferred))

    check_shares(fill(1), len(mini_batches))
    # Tokens of a mini-batch without any fill nothing.
    if all(sum(map(sum, each)) for each in mini_batches) and mini_batches:
        with pytest.raises(LivenessError, match=f"^{wrong}, by which verl divides the loss, does not match"):
            check_shares(fill(factor), len(mini_batches))


def test_legacy_actors_have_no_denominators() -> None:
    assert fetch([defer_shares(MASK, TensorDict({}, batch_size=2))]) == [{}]


def test_finite_rewards_by_token_whose_sum_overflows() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3e38, 3e38]])
    with pytest.raises(RewardError, match=r"the reward of sequence 1 \(prompt b, step 3\) is inf"):
        check_rewards(rewards, ["a", "b"], "step 3")
    check_rewards(rewards[:1], ["a"])
    check_rewards(torch.zeros(0, 5), [])
