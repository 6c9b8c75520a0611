"""What the loss is divided by once something has been rejected."""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import rows_of

HAS_DENOMINATOR = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""verl's ``loss_agg_mode`` that divide by a count; ``token-sum`` divides by nothing."""


def kept_scale(mode: str, *, response_mask: Tensor, keep: Tensor, mini_batch: Tensor, mini_batch_rows: int) -> Tensor:
    """``scale_of_counts`` of a whole batch.

    Args:
        mode, mini_batch, mini_batch_rows: as there.
        response_mask, keep: (B, T) bool, or nested by row: all rows of the batch.

    Returns:
        (B,) float64.
    """
    rows = rows_of(response_mask=response_mask, keep=keep)
    mask = rows.tokens(response_mask)
    tokens, kept = rows.sum(mask).flatten(), rows.sum(mask & rows.tokens(keep)).flatten()
    return scale_of_counts(mode, tokens=tokens, kept=kept, mini_batch=mini_batch, mini_batch_rows=mini_batch_rows)


def scale_of_counts(mode: str, *, tokens: Tensor, kept: Tensor, mini_batch: Tensor, mini_batch_rows: int) -> Tensor:
    """Factor of each row's loss that turns the original count below it into the count of what is kept.

    With N tokens or rows counted originally, of which R are rejected, that is N / (N - R): a rejected token leaves
    the tokens of its mini-batch, a row without a kept token leaves its rows, and for ``seq-mean-token-mean`` a
    rejected token leaves the T of its row too. Where nothing is rejected it is exactly 1.

    Args:
        mode: verl's ``loss_agg_mode``, one of ``HAS_DENOMINATOR``.
        tokens, kept: (B,) float64, response tokens of each row of the batch, and those of them that are kept.
        mini_batch: (B,) int64, the mini-batch that each row belongs to, over all ranks.
        mini_batch_rows: rows that verl counts in a mini-batch.

    Returns:
        (B,) float64; 1 for a mini-batch of which nothing is kept, whose loss is 0 either way.
    """
    if mode == "token-mean":
        return _without(_by_group(tokens, mini_batch), _by_group(tokens - kept, mini_batch))
    lost_rows = ((kept == 0) & (tokens > 0)).double()
    scale = _without(torch.full_like(tokens, mini_batch_rows), _by_group(lost_rows, mini_batch))
    if mode == "seq-mean-token-mean":
        return scale * _without(tokens, tokens - kept)
    return scale


def mini_batches(rows: int, *, ranks: int, rows_a_mini_batch: int) -> Tensor:
    """The mini-batch of each row as verl deals them: contiguous shares by rank, cut in order within each rank.

    Returns:
        (rows,) int64.
    """
    share, cut = rows // ranks, rows_a_mini_batch // ranks
    return (torch.arange(rows) % share) // cut


def _by_group(values: Tensor, group: Tensor) -> Tensor:
    sums = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, group.to(values.device), values)[group]


def _without(count: Tensor, rejected: Tensor) -> Tensor:
    left = count - rejected
    return torch.where(left > 0, count / left.clamp(min=1), torch.ones_like(count))
