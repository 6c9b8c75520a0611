"""Detection of missing or substituted rollout log-probs, batch after batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..correction.deferred_value import DeferredValue
from ..correction.row_blocks import BLOCK, split_tokens
from ..correction.row_layout import RowLayout, detect_layout

LEAST_TOKENS = 8
"""Fewest tokens of a row, or of a batch, that are judged."""
FAR = 1.0
"""|log pi_old - log mu| of a token, in nats, from which its mu may be what stands in for a log-prob."""
UNSURE = 0.1
"""Mean -log pi_old, in nats a token, above which a row of zeros cannot be the rollout engine's log-probs."""


class RolloutLogProbError(RuntimeError):
    """The rollout engine returned no usable log-probs; the message says what came instead."""


@dataclass(frozen=True)
class Column:
    """A column of log-probs that a server returned, as errors name it.

    Attributes:
        most_nonfinite: share of its tokens.
    """

    name: str = "rollout_log_probs"
    fix: str = "Look at the rollout engine's log, and at actor_rollout_ref.rollout.calculate_log_probs=true."
    error: type[RuntimeError] = RolloutLogProbError
    most_nonfinite: float = 0.5


MU = Column()


def build_missing_error(present: object) -> RolloutLogProbError:
    """Build the error for a batch without rollout log-probs; ``present`` is what it has."""
    return RolloutLogProbError(
        f"{MU.name} have stopped arriving: the batch came without them, it has {present}. {MU.fix}"
    )


def check_arrived(rollout_log_prob: Tensor, response_mask: Tensor, column: Column = MU) -> None:
    """Check that mu can be log-probs, judging by its values alone.

    Args:
        rollout_log_prob: (B, T) log mu, or nested by row, as the mask; or what ``column`` names.
        response_mask: (B, T) bool or 0/1.

    Raises:
        RolloutLogProbError: most of mu is not finite, above 0, or one and the same number; or ``column.error``.
    """
    rows = detect_layout(mu=rollout_log_prob, mask=response_mask)
    columns = (rows.tokens(each).flatten().split(BLOCK) for each in (rollout_log_prob, response_mask))
    tokens, lost, low, high = 0, 0, math.inf, -math.inf
    for values, mask in zip(*columns, strict=True):
        if not len(values):
            continue
        there, mu = mask.bool(), values.float()
        # To select by booleans takes ten times as long as to compute with them.
        finite = there & (mu.abs() < math.inf)
        counted, kept = int(there.sum()), int(finite.sum())
        tokens, lost = tokens + counted, lost + counted - kept
        low = min(low, float(torch.where(finite, mu, math.inf).amin()))
        high = max(high, float(torch.where(finite, mu, -math.inf).amax()))
    name, fix = column.name, column.fix
    if lost > column.most_nonfinite * tokens:
        raise column.error(f"{name} have stopped arriving: {lost} of {tokens} are not finite. {fix}")
    # Rounding may put the log-prob of a certain token a little above 0.
    if high > 1e-3:
        raise column.error(f"{name} hold no log-probs: the greatest is {high:.3g}, above 0. {fix}")
    # All zeros can be meant by an engine that is sure of each token: the trainer's policy has to say.
    if tokens >= LEAST_TOKENS and low == high != 0.0:
        raise column.error(f"{name} have stopped arriving: all {tokens} are {low:.3g}, which stands in for them. {fix}")


def check_zeros(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor, column: Column = MU) -> None:
    """Check that rows of zeros only are rows that the trainer's policy is sure of as well; see ``find_zero_rows``.

    Args:
        rollout_log_prob, trainer_log_prob, response_mask: as there, or nested by row.

    Raises:
        RolloutLogProbError: zeros stand in for the log-probs of some rows, or of all; or ``column.error``.
    """
    columns = {"mu": rollout_log_prob, "trainer": trainer_log_prob, "mask": response_mask}
    found = sum(_count_zero_rows(rows, **block) for _, rows, block in split_tokens(columns))
    assert isinstance(found, Tensor), "there is a block of no rows, at least"
    _judge_zeros(len(rollout_log_prob), found.tolist(), column)


@torch.no_grad()
def check_placeholders(
    rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor, tokens: Tensor | None = None
) -> None:
    """Check that no single number stands in for mu at some tokens, such as an end of sequence that an agent appended.

    It is 0 in two rows, or any number in eight rows at one token id, where the trainer's log-probs are far from it; and
    so in a hundredth of the rows and in half of the tokens that have this number.

    Args:
        rollout_log_prob, trainer_log_prob, response_mask: (B, T), or nested by row.
        tokens: their ids, to name them.

    Raises:
        RolloutLogProbError: some are.
    """
    rows = detect_layout(mu=rollout_log_prob, trainer=trainer_log_prob, mask=response_mask)
    mu, trainer, mask = (rows.tokens(each) for each in (rollout_log_prob, trainer_log_prob, response_mask))
    far = mask.bool() & ((trainer - mu).abs() > FAR)
    if not far.any():
        return
    row = rows.broadcast(rows.to_column(torch.arange(rows.count))).expand(far.shape)[far]
    values, gaps = mu[far], trainer[far]
    value, count = values.unique(return_counts=True)
    for number in {0.0, float(value[count.argmax()])}:
        here = values == number
        held, least = len(row[here].unique()), 2 if number == 0 else LEAST_TOKENS
        ids = [] if tokens is None else rows.tokens(tokens)[far][here].unique().tolist()
        if held < max(least, rows.count / 100) or int(here.sum()) * 2 < int((mask.bool() & (mu == number)).sum()):
            continue
        if number == 0 or len(ids) == 1:
            named = f", {'all' if len(ids) == 1 else 'some'} with the id {ids[0]}" if ids else ""
            raise RolloutLogProbError(
                f"{MU.name} are exactly {number:g} at {int(here.sum())} tokens in {held} of {rows.count} rows, to "
                f"which the trainer gives e^{float(gaps[here].mean()):.3g} in the mean{named}: a number stands in "
                f"for what was not sampled. Let the agent loop set response_mask=0 at tokens that it appends itself, "
                f"or return their log-probs."
            )


@torch.no_grad()
def find_zero_rows(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor) -> DeferredValue[None]:
    """Count rows of zeros only, on the device; the value raises ``RolloutLogProbError`` when it is fetched.

    Args:
        rollout_log_prob: (B, T) log mu.
        trainer_log_prob: (B, T) log pi_old.
        response_mask: (B, T) bool or 0/1.
    """
    rows = detect_layout(mu=rollout_log_prob, trainer=trainer_log_prob, mask=response_mask)
    found = _count_zero_rows(rows, *map(rows.tokens, (rollout_log_prob, trainer_log_prob, response_mask)))
    return DeferredValue(found, partial(_judge_zeros, len(response_mask)))


def _count_zero_rows(rows: RowLayout, mu: Tensor, trainer: Tensor, mask: Tensor) -> Tensor:
    """Count rows of zeros, those of them that tell, their tokens, and all tokens: (4,) int64.

    Args:
        mu, trainer, mask: tensors of tokens in this layout.
    """
    there = mask.bool()
    tokens = rows.sum(there)
    unsure = -rows.sum(torch.where(there, trainer.float().nan_to_num(), 0.0))
    zero = (rows.sum(there & (mu != 0)) == 0) & (unsure > UNSURE * tokens)
    telling = zero & (tokens >= LEAST_TOKENS)
    return torch.stack([zero.sum(), telling.sum(), (tokens * zero).sum().long(), tokens.sum().long()])


def _judge_zeros(rows: int, numbers: list[int], column: Column = MU) -> None:
    zero, telling, tokens_of_zero, tokens = numbers
    # Rows too short to tell by themselves tell together.
    together = tokens_of_zero >= max(LEAST_TOKENS, tokens // 2)
    if telling or together:
        raise column.error(
            f"{column.name} have stopped arriving: {zero} of {rows} rows hold nothing but zeros, where the "
            f"trainer's policy is unsure by more than {UNSURE:g} nats a token. {column.fix}"
        )
