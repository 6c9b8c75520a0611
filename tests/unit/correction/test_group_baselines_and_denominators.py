"""The effect of rejected rows on the baselines of their groups and on the loss's denominators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.offpolicy.correction.decisions import (
    GROUP_ESTIMATORS,
    HAS_DENOMINATOR,
    assign_mini_batches,
    compute_scale_of_counts,
    regroup,
)
from tests.support.examples import at_most
from verl.trainer.ppo.core_algos import agg_loss, get_adv_estimator_fn


def scale_of(mode: str, mask: torch.Tensor, keep: torch.Tensor, group: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the scale of rows whose kept tokens are given by ``keep``, with ``rows`` rows in a mini-batch."""
    tokens, kept = (each.sum(-1).double() for each in (mask, mask & keep))
    return compute_scale_of_counts(mode, tokens=tokens, kept=kept, mini_batch=group, mini_batch_rows=rows)


@st.composite
def batches(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, width, generator=generator) < 0.8
    mask[:, 0] = True  # verl counts rows without a token as rows of the mini-batch
    keep = mask & (torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.3, 0.9])))
    return mask, keep, torch.randn(rows, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("mode", HAS_DENOMINATOR)
@settings(max_examples=at_most(60))
@given(batch=batches())
def test_it_is_verls_mean_over_what_is_kept(mode: str, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    mask, keep, loss = batch
    scale = scale_of(mode, mask, keep, torch.zeros(len(mask), dtype=torch.int64), len(mask))
    # verl's norm mode divides by a constant next to the rows.
    counts = dict(batch_num_tokens=int(mask.sum()), global_batch_size=len(mask), loss_scale_factor=7)
    ours = agg_loss(loss * keep * scale[:, None], mask, mode, **counts)
    if not keep.any():
        assert ours == 0
        return
    # verl itself, on a batch in which the rejected tokens never were.
    theirs = agg_loss(loss, keep, mode, loss_scale_factor=7)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)  # verl adds 1e-8 to a row's T


def test_rows_are_dealt_as_verl_deals_them() -> None:
    assert assign_mini_batches(8, ranks=1, rows_a_mini_batch=4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    # Rank 0 has rows 0 to 3 and trains on 0, 1 first; rank 1 has rows 4 to 7.
    assert assign_mini_batches(8, ranks=2, rows_a_mini_batch=4).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


GROUPS = ["a", "a", "a", "b", "b", "c"]
REJECTED = torch.tensor([False, True, False, True, False, False])
REWARDS = [1.0, 5.0, 3.0, 2.0, 4.0, 7.0]


def advantages(estimator: str, groups: list[str], rewards_of_rows: list[float] = REWARDS) -> list[float]:
    rewards = torch.tensor(rewards_of_rows)[:, None] * torch.tensor([0.0, 1.0])
    values, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards,
        response_mask=torch.ones(len(groups), 2),
        index=np.array(groups, dtype=object),
    )
    assert torch.equal(values[:, 0], values[:, 1])
    return values[:, 0].tolist()


def test_rejected_rows_stand_alone_and_survivors_without_siblings_fall_silent() -> None:
    groups, silent = regroup(GROUPS, REJECTED)
    assert groups[0] == groups[2] == "a"
    assert groups[4] == "b"
    assert groups[5] == "c"
    assert len({groups[0], groups[1], groups[3], groups[4], groups[5]}) == 5
    # 1 and 3 are rejected; 4 is all that is left of b; c never had a sibling and stays as verl has it.
    assert silent == [False, True, False, True, True, False]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_rejected_reward_no_longer_matters(estimator: str) -> None:
    groups, silent = regroup(GROUPS, REJECTED)
    left = [row for row, quiet in enumerate(silent) if not quiet]
    before = [advantages(estimator, groups)[row] for row in left]
    changed = [-100.0 if gone else reward for reward, gone in zip(REWARDS, REJECTED.tolist(), strict=True)]
    after = [advantages(estimator, groups, changed)[row] for row in left]
    assert after == pytest.approx(before)
    assert [advantages(estimator, GROUPS, changed)[row] for row in left] != pytest.approx(before)
