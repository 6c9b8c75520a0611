"""Effects of a rejection beyond the rejected tokens: on the denominator of the loss, and on the group's baseline.

GRPO, RLOO and OPO compare a row with its siblings. A row that the correction rejects contributes nothing to training,
yet its reward changes the advantages of its remaining siblings. ``baseline=exclude`` prevents this by moving each
rejected row to a group of its own before verl's estimator runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from .row_layout import detect_layout

HAS_DENOMINATOR = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Values of verl's ``loss_agg_mode`` that divide by a count; ``token-sum`` does not divide."""


def compute_scale_of_counts(
    mode: str, *, tokens: Tensor, kept: Tensor, mini_batch: Tensor, mini_batch_rows: int
) -> Tensor:
    """Compute each row's loss factor that replaces the original denominator with a count of kept tokens or rows.

    If R of N counted tokens or rows are rejected, the factor is N / (N - R). Rejected tokens are removed from the
    mini-batch's token count, and rows without a kept token from its row count. For ``seq-mean-token-mean``, rejected
    tokens are also removed from their row's T. If nothing is rejected, the factor is exactly 1.

    Args:
        mode: verl's ``loss_agg_mode``, one of ``HAS_DENOMINATOR``.
        tokens, kept: (B,) float64, number of response tokens in each row of the batch, and number of kept tokens.
        mini_batch: (B,) int64, the mini-batch of each row, over all ranks.
        mini_batch_rows: number of rows that verl counts in a mini-batch.

    Returns:
        (B,) float64; 1 for a mini-batch without kept tokens, whose loss is 0 in any case.

    Example:
        >>> tokens, kept = torch.tensor([3.0, 1.0]), torch.tensor([3.0, 0.0])
        >>> batch = torch.tensor([0, 0])
        >>> counts = dict(tokens=tokens, kept=kept, mini_batch=batch, mini_batch_rows=2)
        >>> compute_scale_of_counts("seq-mean-token-sum", **counts).tolist()  # 1 of 2 rows is kept
        [2.0, 2.0]
    """
    if mode == "token-mean":
        return _without(_by_group(tokens, mini_batch), _by_group(tokens - kept, mini_batch))
    lost_rows = ((kept == 0) & (tokens > 0)).double()
    scale = _without(torch.full_like(tokens, mini_batch_rows), _by_group(lost_rows, mini_batch))
    if mode == "seq-mean-token-mean":
        return scale * _without(tokens, tokens - kept)
    return scale


def find_finite_tokens(response_mask: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """Return bool flags of the response tokens whose mu is finite, in the layout of the arguments.

    Example:
        >>> find_finite_tokens(torch.ones(1, 2), torch.tensor([[-1.0, float("nan")]])).tolist()
        [[True, False]]
    """
    rows = detect_layout(response_mask=response_mask, rollout_log_prob=rollout_log_prob)
    finite = torch.isfinite(rows.tokens(rollout_log_prob))
    return rows.to_given_layout(rows.tokens(response_mask).bool() & finite)


def assign_mini_batches(rows: int, *, ranks: int, rows_a_mini_batch: int) -> Tensor:
    """Assign each row to a mini-batch as verl does: each rank receives contiguous rows, which are split in order.

    Returns:
        (rows,) int64.

    Example:
        >>> assign_mini_batches(8, ranks=2, rows_a_mini_batch=4)
        tensor([0, 0, 1, 1, 0, 0, 1, 1])
    """
    share, cut = rows // ranks, rows_a_mini_batch // ranks
    return (torch.arange(rows) % share) // cut


def _by_group(values: Tensor, group: Tensor) -> Tensor:
    sums = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, group.to(values.device), values)[group]


def _without(count: Tensor, rejected: Tensor) -> Tensor:
    left = count - rejected
    # The clamp avoids 0 / 0 in the branch that is not taken.
    return torch.where(left > 0, count / left.clamp(min=1), torch.ones_like(count))


GROUP_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
"""Values of verl's ``algorithm.adv_estimator`` for which a row's advantage depends only on its own group."""


def regroup(groups: Sequence[str], rejected: Tensor) -> tuple[list[str], list[bool]]:
    """Assign groups for the baseline so that a rejected row has no siblings.

    Args:
        groups: group of each row, such as verl's uid.
        rejected: (B,) bool, rows without a kept token.

    Returns:
        The new group of each row, and whether the row's advantage is 0. The advantage is 0 for a rejected row, which
        contributes nothing to training, and for the only remaining row of a larger group, because that row has no
        sibling left to be compared with.

    Example:
        >>> import torch
        >>> groups, zeroed = regroup(["a", "a", "b", "b"], torch.tensor([False, False, True, False]))
        >>> groups
        ['a', 'a', 'b/rejected-2', 'b']
        >>> zeroed  # row 3 has lost its only sibling
        [False, False, True, True]
    """
    lost = rejected.tolist()
    size = Counter(groups)
    left = Counter(group for group, gone in zip(groups, lost, strict=True) if not gone)
    rows = list(zip(groups, lost, strict=True))
    regrouped = [f"{group}/rejected-{row}" if gone else group for row, (group, gone) in enumerate(rows)]
    silent = [gone or (left[group] == 1 and size[group] > 1) for group, gone in rows]
    return regrouped, silent
