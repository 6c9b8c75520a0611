"""Guard against rewards by token that an estimator sums to one outcome a row, so that no token is credited for its own.

Estimators are judged by what they compute, a user's own ones included: a reward is moved within a row of a small
batch, and one that sees where rewards stand gives other advantages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor

from ..correction.problem import CheckError, Problem, set_to

logger = logging.getLogger("verl.offpolicy")

KEY = "algorithm.adv_estimator"
BY_TOKEN = "reinforce_plus_plus"
"""Estimator of verl's that sees where a reward stands, and needs no critic."""


class DenseRewardError(CheckError):
    """Rewards by token meet an estimator that sums them."""


class ScoredRows(Protocol):
    """The part of ``extensions.batch_view.BatchView`` that is read."""

    step: int

    @property
    def uids(self) -> Sequence[str]: ...

    @property
    def scores(self) -> Tensor: ...

    def rows(self, *names: str) -> dict[str, Any]: ...


class DenseRewardGuard:
    """Check of each batch, until the estimator is known to see where rewards stand.

    Args:
        config: of the run.
        compute: verl's ``compute_advantage``.
        outcome: estimators that are known to sum a row, for those that the probe cannot run.
    """

    def __init__(self, config: DictConfig, compute: Callable[..., Any], outcome: Collection[str] = ()) -> None:
        self._config, self._compute, self._outcome = config, compute, outcome
        self._sees = False

    def check(self, batch: ScoredRows) -> None:
        """Check a batch; rewards by token may come first in a later one.

        Raises:
            DenseRewardError: a reward stands before a row's last token, and the estimator does not see where.
        """
        if self._sees:
            return
        scores = batch.scores
        found = find_dense_reward(scores, batch.rows("response_mask")["response_mask"])
        if found is None:
            return
        estimator = str(self._config.algorithm.adv_estimator)
        sees = sees_positions(self._config, self._compute)
        if sees is None:
            logger.warning("%s=%s could not be tried with rewards by token.", KEY, estimator)
            sees = estimator not in self._outcome
        if not sees:
            raise DenseRewardError([_build_problem(estimator, *found, float(scores[found]))])
        self._sees = True


def _build_problem(estimator: str, row: int, token: int, reward: float) -> Problem:
    reason = (
        f"it sums the rewards of a row to one outcome, and row {row} has one of {reward:g} at token {token}, before "
        f"its last: no token would be credited for its own."
    )
    fix = f"Set {KEY}={BY_TOKEN} or gae, or give each row its reward at its last token."
    return Problem(KEY, estimator, reason, fix, parts=("dense_reward",), overrides=(set_to(KEY, BY_TOKEN),))


def find_dense_reward(scores: Tensor, response_mask: Tensor) -> tuple[int, int] | None:
    """Find the first reward that stands before its row's last response token; (row, token), or None.

    Args:
        scores: (B, T) float.
        response_mask: (B, T) bool or 0/1.
    """
    left = response_mask.bool().flip(-1).cumsum(-1).flip(-1)
    dense = (scores != 0) & (left - response_mask.long() > 0)
    if not dense.any():
        return None
    row, token = (int(index) for index in dense.nonzero()[0])
    return row, token


def sees_positions(config: DictConfig, compute: Callable[..., Any]) -> bool | None:
    """Return True if the configured estimator's advantages depend on where in a row a reward stands.

    Args:
        config: with ``algorithm`` and ``actor_rollout_ref.rollout.n``.
        compute: verl's ``compute_advantage``.

    Returns:
        None if the estimator cannot be run on the probe's columns.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            last, *moved = (_estimate(config, compute, token) for token in (3, 0, 1))
    except Exception as error:
        logger.info("the probe of %s=%s failed: %s", KEY, config.algorithm.adv_estimator, error)
        return None
    return any(not torch.allclose(last, each, atol=1e-6) for each in moved)


def _estimate(config: DictConfig, compute: Callable[..., Any], token: int) -> Tensor:
    """Compute the advantages of two groups of two rows, with the second row's reward at ``token``."""
    import numpy as np

    from verl import DataProto

    rewards = torch.zeros(4, 4)
    rewards[:, 3] = torch.tensor([1.0, 0.0, 0.5, -1.0])
    rewards[1, token] += 2.0
    columns = {
        "token_level_rewards": rewards,
        "token_level_scores": rewards.clone(),
        "response_mask": torch.ones(4, 4, dtype=torch.int64),
        "values": torch.linspace(-1.0, 1.0, 16).reshape(4, 4),
        "old_log_probs": torch.linspace(-2.0, -0.5, 16).reshape(4, 4),
        "sum_pi_squared": torch.full((4, 4), 0.5),
    }
    algorithm = config.algorithm
    if algorithm.adv_estimator == "remax":
        columns["reward_baselines"] = torch.tensor([0.25, 0.25, -0.5, -0.5])
    data = compute(
        DataProto.from_dict(columns, non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)}),
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=2,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    advantages: Tensor = data.batch["advantages"]
    return advantages.float()
