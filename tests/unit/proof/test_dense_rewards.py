"""Per-token rewards with verl's own estimators and a user's estimator, each judged by what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.offpolicy.preflight.composed import OUTCOME
from recipe.offpolicy.proof.rewards import DenseRewardError, DenseRewardGuard, sees_positions
from verl.trainer.ppo import core_algos
from verl_patches.trainer_seams import plain_advantage

MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0]])
DENSE = torch.tensor([[0.0, 0.5, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0]])


def config(estimator: str) -> DictConfig:
    return OmegaConf.create({"algorithm": {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0}})


def guard(estimator: str) -> DenseRewardGuard:
    return DenseRewardGuard(config(estimator), plain_advantage(), OUTCOME)


def batch(scores: torch.Tensor) -> Any:
    return SimpleNamespace(scores=scores, rows=lambda *names: {"response_mask": MASK})


@pytest.fixture
def own_sum() -> Iterator[str]:
    """A user's own estimator, which returns the row's sum like any outcome estimator."""

    @core_algos.register_adv_est("own_sum")
    def own_sum(token_level_rewards: Any, response_mask: Any, config: Any = None, **kwargs: Any) -> Any:
        found = token_level_rewards.sum(-1, keepdim=True) * response_mask
        return found, found

    yield "own_sum"
    del core_algos.ADV_ESTIMATOR_REGISTRY["own_sum"]


@pytest.mark.parametrize(
    "estimator",
    ["grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo", "gpg"],
)
def test_verls_estimators_that_sum_a_row_stop_the_run(estimator: str) -> None:
    assert sees_positions(config(estimator), plain_advantage()) is False
    with pytest.raises(DenseRewardError, match=rf"adv_estimator={estimator}: .*0\.5 at token 1") as raised:
        guard(estimator).check(batch(DENSE))
    assert raised.value.problems[0].overrides == ("algorithm.adv_estimator=reinforce_plus_plus",)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
def test_estimators_that_see_positions_train(estimator: str) -> None:
    assert sees_positions(config(estimator), plain_advantage()) is True
    guard(estimator).check(batch(DENSE))


def test_a_users_own_estimator_is_judged_too(own_sum: str) -> None:
    with pytest.raises(DenseRewardError, match=own_sum):
        guard(own_sum).check(batch(DENSE))


def test_an_estimator_that_cannot_be_tried_is_judged_by_its_name() -> None:
    """gdpo needs rewards by dimension, and unknown_one is unknown."""
    assert sees_positions(config("gdpo"), plain_advantage()) is None
    with pytest.raises(DenseRewardError, match="gdpo"):
        guard("gdpo").check(batch(DENSE))
    guard("unknown_one").check(batch(DENSE))
