"""Group baselines without rejected siblings, with verl's own estimators, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recipe.offpolicy.correction.decisions import GROUP_ESTIMATORS, regroup
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

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


def test_rloo_by_hand() -> None:
    """Each against the other: 1 - 3 and 3 - 1. With the sibling's 5: 1 - 4 and 3 - 3."""
    groups, _ = regroup(GROUPS, REJECTED)
    values = advantages("rloo", groups)
    assert (values[0], values[2]) == (pytest.approx(-2.0), pytest.approx(2.0))
    plain = advantages("rloo", GROUPS)
    assert (plain[0], plain[2]) == (pytest.approx(-3.0), pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_rejected_reward_no_longer_matters(estimator: str) -> None:
    groups, silent = regroup(GROUPS, REJECTED)
    left = [row for row, quiet in enumerate(silent) if not quiet]
    before = [advantages(estimator, groups)[row] for row in left]
    changed = [-100.0 if gone else reward for reward, gone in zip(REWARDS, REJECTED.tolist(), strict=True)]
    after = [advantages(estimator, groups, changed)[row] for row in left]
    assert after == pytest.approx(before)
    assert [advantages(estimator, GROUPS, changed)[row] for row in left] != pytest.approx(before)
