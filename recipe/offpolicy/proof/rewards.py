"""Checks that rewards are finite and that the estimator uses their positions; normalisation robust to rounding.

An advantage estimator that sums per-token rewards into one outcome assigns every token the same credit. The guard in
this module tests the configured estimator, even a custom one: it moves a reward within a sequence of a small batch and
checks that the advantages change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from ..correction.problem import CheckError, Problem, set_to


class RewardError(ValueError):
    """A sequence's reward is not finite."""


_BY_FUNCTION = "Return a finite number from the reward function."
BY_KL = (
    "The score is finite, but the KL of algorithm.use_kl_in_reward is not, because log-probs of the policy or the "
    "reference are not finite. Check the reference model, or set algorithm.use_kl_in_reward=false."
)


def check_rewards(rewards: Tensor, uids: Sequence[object], where: str = "", advice: str = _BY_FUNCTION) -> None:
    """Check that the rewards of all sequences are finite.

    Args:
        rewards: (B,), or (B, T) per token; the sum over a row must be finite too.
        uids: (B,) uids of the sequences' prompts.
        where: description of the batch for errors, for example "step 3".
        advice: sentences on what to do.

    Raises:
        RewardError: a reward is not finite; the message names the first such sequence.
    """
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    by_row = values if values.dim() == 1 else values.sum(-1)
    lost = ~torch.isfinite(by_row)
    if not bool(lost.any()):
        return
    row = int(lost.nonzero()[0])
    of = ", ".join(filter(None, (f"prompt {uids[row]}", where)))
    raise RewardError(f"the reward of sequence {row} ({of}) is {float(by_row[row])}. {advice}")


ROUNDING = 8 * 2.0**-23
"""Largest spread, relative to the largest value, that float32 rounding can explain, because a reward is a sum of a few
rounded terms."""
SMALLEST = 2.0**-126
"""Smallest normal float32; the rounding error of smaller numbers is as large as that of this number."""


def mean(values: Tensor) -> float:
    """Compute the mean in float64; NaN if there are no values."""
    return float(values.double().mean())


@dataclass(frozen=True)
class Spread:
    """Standard deviation about the mean, or root mean square, of one set of values.

    Attributes:
        value: 0 or more, in the unit of the values.
        certainty: 0 if rounding explains all of ``value``, 1 if ``value`` is at least twice the spread that rounding
            explains, and linear in between.
    """

    value: float
    certainty: float

    def invert(self, otherwise: float = 0.0) -> float:
        """Compute the factor 1 / value, with a continuous transition to ``otherwise`` if rounding explains ``value``.

        With ``otherwise=0``, values that agree within rounding become 0. In all other cases, n normalised values are at
        most sqrt(n - 1) if they were centred, and at most sqrt(n) if they were divided by their root mean square.
        """
        known = self.certainty / self.value if self.certainty else 0.0
        return known + (1 - self.certainty) * otherwise


def measure_spread(values: Tensor, *, centred: bool, size: float = 0.0) -> Spread:
    """Measure the spread of values.

    Args:
        values: (n,) float; the spread about the mean is 0 for fewer than two values.
        centred: True for the unbiased standard deviation about the mean; False for the root mean square, for a scale
            without centring.
        size: magnitude of the numbers from which the values were computed (for example as differences). The rounding
            error is relative to the larger of ``size`` and the largest value.

    Raises:
        ValueError: a value is not finite.

    Example:
        >>> measure_spread(torch.tensor([1.0, 1.0 + 2**-22]), centred=True).certainty  # two steps of float32 apart
        0.0
        >>> measure_spread(torch.tensor([3.0, 4.0]), centred=False).invert() == 12.5**-0.5
        True
    """
    if not torch.isfinite(values).all():
        at = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"value {at} of {len(values)} is {float(values[at])}: expected finite numbers.")
    values = values.double()
    peak = float(values.abs().max()) if len(values) > int(centred) else 0.0
    if not peak:
        return Spread(0.0, 0.0)
    scaled = values / peak  # squares of large values overflow
    value = peak * float(scaled.std() if centred else scaled.square().mean().sqrt())
    certainty = value / (ROUNDING * max(peak, size, SMALLEST)) - 1
    return Spread(value, min(max(certainty, 0.0), 1.0))


logger = logging.getLogger("verl.offpolicy")

KEY = "algorithm.adv_estimator"
BY_TOKEN = "reinforce_plus_plus"
"""A verl estimator that uses the position of a reward and needs no critic."""


class DenseRewardError(CheckError):
    """The configured estimator sums the per-token rewards of a sequence."""


class DenseRewardGuard:
    """Guard that checks each batch until it is known that the estimator uses the positions of rewards.

    Args:
        config: configuration of the run.
        compute: verl's ``compute_advantage``.
        outcome: names of estimators that are known to sum a sequence's rewards; used if the probe cannot run the
            estimator.
    """

    def __init__(self, config: DictConfig, compute: Callable[..., Any], outcome: Collection[str] = ()) -> None:
        self._config, self._compute, self._outcome = config, compute, outcome
        self._sees = False

    def check(self, batch: Any) -> None:
        """Check one batch. The first per-token reward may appear in any batch.

        Raises:
            DenseRewardError: a sequence has a reward before its last token and the estimator ignores its position.
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
            logger.warning("%s=%s: the check with per-token rewards could not run this estimator.", KEY, estimator)
            sees = estimator not in self._outcome
        if not sees:
            row, token = found
            reason = (
                f"this estimator sums the rewards of a sequence into one outcome, but sequence {row} has a reward of "
                f"{float(scores[found]):g} at token {token}, before its last token, so all tokens would receive the "
                "same credit."
            )
            fix = f"Set {KEY}={BY_TOKEN} or gae, or put each sequence's reward on its last token."
            overrides = (set_to(KEY, BY_TOKEN),)
            raise DenseRewardError([Problem(KEY, estimator, reason, fix, parts=("dense_reward",), overrides=overrides)])
        self._sees = True


def find_dense_reward(scores: Tensor, response_mask: Tensor) -> tuple[int, int] | None:
    """Find the first reward that precedes its sequence's last response token: (row, token), or None.

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
    """Return True if the configured estimator's advantages depend on the position of a reward in its sequence.

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
    """Compute the advantages of two groups of two sequences, with the second sequence's reward at ``token``."""
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
