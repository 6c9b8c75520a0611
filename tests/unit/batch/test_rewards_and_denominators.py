"""Means over a mini-batch, and spreads of rewards that rounding explains."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from recipe.offpolicy.batch.plan import add_shares, check_shares, defer_shares, mini_batch_mean
from recipe.offpolicy.batch.seals import LivenessError
from recipe.offpolicy.correction.statistics import fetch
from recipe.offpolicy.proof.rewards import ROUNDING, RewardError, check_rewards, measure_spread
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
        with pytest.raises(LivenessError, match=f"^verl divides the loss by {wrong}, but"):
            check_shares(fill(factor), len(mini_batches))


def test_legacy_actors_have_no_denominators() -> None:
    assert fetch([defer_shares(MASK, TensorDict({}, batch_size=2))]) == [{}]


def test_finite_rewards_by_token_whose_sum_overflows() -> None:
    rewards = torch.tensor([[1.0, 0.0], [3e38, 3e38]])
    with pytest.raises(RewardError, match=r"the reward of sequence 1 \(prompt b, step 3\) is inf"):
        check_rewards(rewards, ["a", "b"], "step 3")
    check_rewards(rewards[:1], ["a"])
    check_rewards(torch.zeros(0, 5), [])


def test_by_hand() -> None:
    """For 1, 2, 6: deviation sqrt((4 + 1 + 9) / 2), root mean square sqrt(41 / 3)."""
    values = torch.tensor([1.0, 2.0, 6.0])
    assert measure_spread(values, centred=True).value == pytest.approx(math.sqrt(7))
    assert measure_spread(values, centred=False).value == pytest.approx(math.sqrt(41 / 3))
    assert measure_spread(values, centred=True).invert(otherwise=9.0) == pytest.approx(1 / math.sqrt(7))


def test_between_rounding_and_a_spread_it_is_continuous() -> None:
    """Two values of size 1 with deviations of 1, 1.5 and 2 times what rounding explains: 0, half and all of 1 / s."""
    for times, share in ((1.0, 0.0), (1.5, 0.5), (2.0, 1.0)):
        apart = times * ROUNDING * math.sqrt(2)
        spread = measure_spread(torch.tensor([1.0, 1.0 - apart], dtype=torch.float64), centred=True)
        assert spread.certainty == pytest.approx(share, abs=1e-8)
        assert spread.invert(otherwise=7.0) == pytest.approx(share / spread.value + (1 - share) * 7, rel=1e-5)


def test_rounding_is_that_of_the_numbers_that_were_subtracted() -> None:
    values = torch.tensor([1e-6, -1e-6])
    assert measure_spread(values, centred=True).certainty == 1.0
    assert measure_spread(values, centred=True, size=2.0).certainty == 0.0


def test_numbers_below_the_normal_ones_are_rounding() -> None:
    """There, float32 has steps of 2^-149, which are as large as the numbers."""
    for values in (torch.tensor([2.0**-149, 0.0]), torch.tensor([5e-324, 0.0], dtype=torch.float64)):
        assert measure_spread(values, centred=True).certainty == 0.0


@pytest.mark.parametrize("centred", [True, False])
def test_nothing_to_divide_by(centred: bool) -> None:
    for values in (torch.zeros(0), torch.zeros(3)):
        assert measure_spread(values, centred=centred).invert(otherwise=3.0) == 3.0
    assert measure_spread(torch.tensor([5.0]), centred=centred).invert() == (0.0 if centred else 0.2)
    with pytest.raises(ValueError, match="value 1 of 2 is nan"):
        measure_spread(torch.tensor([0.0, math.nan]), centred=centred)
