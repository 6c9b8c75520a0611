"""Detection of missing or substituted rollout log-probs, batch after batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..correction.deferred_value import DeferredValue, fetch

LEAST_TOKENS = 8
"""Fewest tokens of a row, or of a batch, that are judged."""
UNSURE = 0.1
"""Mean -log pi_old, in nats a token, above which a row of zeros cannot be the rollout engine's log-probs."""
MOST_NONFINITE = 0.5
_KEY = "rollout_log_probs"
_FIX = "Look at the rollout engine's log, and at actor_rollout_ref.rollout.calculate_log_probs=true."


class RolloutLogProbError(RuntimeError):
    """The rollout engine returned no usable log-probs; the message says what came instead."""


def build_missing_error(present: object) -> RolloutLogProbError:
    """Build the error for a batch without rollout log-probs; ``present`` is what it has."""
    return RolloutLogProbError(f"{_KEY} have stopped arriving: the batch came without them, it has {present}. {_FIX}")


def check_arrived(rollout_log_prob: Tensor, response_mask: Tensor) -> None:
    """Check that mu can be log-probs, judging by its values alone.

    Args:
        rollout_log_prob: (B, T) log mu.
        response_mask: (B, T) bool or 0/1.

    Raises:
        RolloutLogProbError: most of mu is not finite, above 0, or one and the same number.
    """
    mu = rollout_log_prob[response_mask.bool()].float()
    if not len(mu):
        return
    finite = torch.isfinite(mu)
    lost = len(mu) - int(finite.sum())
    if lost > MOST_NONFINITE * len(mu):
        raise RolloutLogProbError(f"{_KEY} have stopped arriving: {lost} of {len(mu)} are not finite. {_FIX}")
    low, high = torch.aminmax(mu[finite])
    # Rounding may put the log-prob of a certain token a little above 0.
    if high > 1e-3:
        raise RolloutLogProbError(f"{_KEY} hold no log-probs: the greatest is {float(high):.3g}, above 0. {_FIX}")
    # All zeros can be meant by an engine that is sure of each token: the trainer's policy has to say.
    if len(mu) >= LEAST_TOKENS and low == high != 0.0:
        raise RolloutLogProbError(
            f"{_KEY} have stopped arriving: all {len(mu)} are {float(low):.3g}, which stands in for them. {_FIX}"
        )


def check_zeros(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor) -> None:
    """Check that rows of zeros only are rows that the trainer's policy is sure of as well; see ``find_zero_rows``.

    Raises:
        RolloutLogProbError: zeros stand in for the log-probs of some rows, or of all.
    """
    fetch([find_zero_rows(rollout_log_prob, trainer_log_prob, response_mask)])


@torch.no_grad()
def find_zero_rows(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor) -> DeferredValue[None]:
    """Count rows of zeros only, on the device; the value raises ``RolloutLogProbError`` when it is fetched.

    Args:
        rollout_log_prob: (B, T) log mu.
        trainer_log_prob: (B, T) log pi_old.
        response_mask: (B, T) bool or 0/1.
    """
    mask = response_mask.bool()
    tokens = mask.sum(-1)
    unsure = -torch.where(mask, trainer_log_prob.float().nan_to_num(), 0.0).sum(-1)
    zero = ((rollout_log_prob == 0) | ~mask).all(-1) & (unsure > UNSURE * tokens)
    telling = zero & (tokens >= LEAST_TOKENS)
    return DeferredValue(
        torch.stack([zero.sum(), telling.sum(), (tokens * zero).sum(), tokens.sum()]),
        partial(_judge_zeros, len(tokens)),
    )


def _judge_zeros(rows: int, numbers: list[int]) -> None:
    zero, telling, tokens_of_zero, tokens = numbers
    # Rows too short to tell by themselves tell together.
    together = tokens_of_zero >= max(LEAST_TOKENS, tokens // 2)
    if telling or together:
        raise RolloutLogProbError(
            f"{_KEY} have stopped arriving: {zero} of {rows} rows hold nothing but zeros, where the "
            f"trainer's policy is unsure by more than {UNSURE:g} nats a token. {_FIX}"
        )
