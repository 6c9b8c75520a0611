"""Whether the rollout engine sent log-probs at all, batch after batch, and not something that stands in for them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..correction.deferred import Reading, fetch

LEAST_TOKENS = 8
"""Tokens of a row, or of a batch, below which nothing is concluded."""
UNSURE = 0.1
"""Nats a token by which the trainer's policy is unsure of a row that the rollout engine cannot have been sure of."""
MOST_NONFINITE = 0.5
_KEY = "rollout_log_probs"
_FIX = "Look at the rollout engine's log, and at actor_rollout_ref.rollout.calculate_log_probs=true."


class ArrivalError(RuntimeError):
    """The rollout's log-probs have stopped arriving; the message says what came instead."""


def missing(present: object) -> ArrivalError:
    """The error for a batch without them."""
    return ArrivalError(f"{_KEY} have stopped arriving: the batch came without them, it has {present}. {_FIX}")


def check_arrived(rollout_log_prob: Tensor, response_mask: Tensor) -> None:
    """That mu holds log-probs, as far as it shows by itself.

    Args:
        rollout_log_prob: (B, T) log mu.
        response_mask: (B, T) bool or 0/1.

    Raises:
        ArrivalError: most of mu is not finite, above 0, or one and the same number.
    """
    mu = rollout_log_prob[response_mask.bool()].float()
    if not len(mu):
        return
    finite = torch.isfinite(mu)
    lost = len(mu) - int(finite.sum())
    if lost > MOST_NONFINITE * len(mu):
        raise ArrivalError(f"{_KEY} have stopped arriving: {lost} of {len(mu)} are not finite. {_FIX}")
    low, high = torch.aminmax(mu[finite])
    if high > 1e-3:
        raise ArrivalError(f"{_KEY} hold no log-probs: the greatest is {float(high):.3g}, above 0. {_FIX}")
    # All zeros can be meant by an engine that is sure of each token: the trainer's policy has to say.
    if len(mu) >= LEAST_TOKENS and low == high != 0.0:
        raise ArrivalError(
            f"{_KEY} have stopped arriving: all {len(mu)} are {float(low):.3g}, which stands in for them. {_FIX}"
        )


def check_zeros(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor) -> None:
    """That rows of nothing but zeros are rows that the trainer's policy is sure of as well; see ``zeros``.

    Raises:
        ArrivalError: zeros stand in for the log-probs of some rows, or of all.
    """
    fetch([zeros(rollout_log_prob, trainer_log_prob, response_mask)])


@torch.no_grad()
def zeros(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor) -> Reading[None]:
    """What there is of rows of nothing but zeros; it raises ``ArrivalError`` when read, where they stand in for mu.

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
    return Reading(
        torch.stack([zero.sum(), telling.sum(), (tokens * zero).sum(), tokens.sum()]),
        partial(_judge_zeros, len(tokens)),
    )


def _judge_zeros(rows: int, numbers: list[int]) -> None:
    zero, telling, tokens_of_zero, tokens = numbers
    # Rows too short to tell by themselves tell together.
    together = tokens_of_zero >= max(LEAST_TOKENS, tokens // 2)
    if telling or together:
        raise ArrivalError(
            f"{_KEY} have stopped arriving: {zero} of {rows} rows hold nothing but zeros, where the "
            f"trainer's policy is unsure by more than {UNSURE:g} nats a token. {_FIX}"
        )
