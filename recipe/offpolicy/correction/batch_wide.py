"""Constants and counts over a whole batch: normalisers, M2PO's cutoff, and the number of tokens kept in each row.

A batch is read block by block, as tensors of tokens, so that temporaries fit in the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .decisions import BatchConstants, choose_ids, decide_rollout, spread_ages
from .masks import compute_second_moment_cutoff
from .ratios import compute_finite_log_ratio
from .row_layout import RowLayout, split_tokens
from .spec import CorrectionSpec
from .units import Level, partition_units
from .weights import sum_weights


def batch_constants(
    spec: CorrectionSpec,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    segment_ids: Tensor | None = None,
    versions: Tensor | None = None,
    staleness: Tensor | None = None,
) -> BatchConstants:
    """Compute the batch-level constants of ``spec`` from tensors of all rows of the batch; see ``rollout_stage``.

    Example:
        >>> from .weights import WeightSpec
        >>> weight = WeightSpec("token", "truncate", None, 2.0, normalize=True)
        >>> pi_old, mu = torch.zeros(1, 2), torch.tensor([[0.0, -5.0]])  # weights 1 and min(e^5, 2)
        >>> policies = dict(old_log_prob=pi_old, rollout_log_prob=mu, response_mask=torch.ones(1, 2))
        >>> batch_constants(CorrectionSpec(weight=weight), **policies).weight_mean
        1.5
    """
    if not spec.needs_constants:
        return BatchConstants()
    budgets = {name: mask.budget for name, mask in spec.masks if mask.budget is not None}
    sums: list[Tensor] = []
    log_ratios: list[Tensor] = []
    for block in _split(spec, old_log_prob, rollout_log_prob, response_mask, segment_ids, versions, staleness):
        valid, log_rho = compute_finite_log_ratio(block.old, block.mu, block.mask)
        if (weight := spec.normalized) is not None:
            units = partition_units(weight.level, valid, block.ids[weight.level], block.rows, block.ages)
            sums.append(torch.stack(sum_weights(weight, log_rho, units)))
        if budgets:
            log_ratios.append(log_rho[valid])
    weight_mean = None
    if sums:
        total, count = torch.stack(sums).sum(0)
        # If everything is rejected, there is nothing to divide.
        weight_mean = float(total / count) if total > 0 else 1.0
    cutoffs = {name: compute_second_moment_cutoff(budget, *log_ratios) for name, budget in budgets.items()}
    return BatchConstants(weight_mean, cutoffs)


def count_kept_by_row(
    spec: CorrectionSpec,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    segment_ids: Tensor | None = None,
    versions: Tensor | None = None,
    staleness: Tensor | None = None,
    constants: BatchConstants,
) -> tuple[Tensor, Tensor]:
    """Count each row's response tokens, and how many the rollout stage keeps, (B,) float64; see ``rollout_stage``.

    Example:
        >>> from .mask_spec import MaskSpec
        >>> spec = CorrectionSpec(masks=(("far", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")),))
        >>> pi_old, mu = torch.zeros(1, 3), torch.tensor([[0.0, -1.0, -1.0]])  # ratios 1, e and e
        >>> policies = dict(old_log_prob=pi_old, rollout_log_prob=mu, response_mask=torch.tensor([[1, 1, 0]]))
        >>> [count.tolist() for count in count_kept_by_row(spec, **policies, constants=BatchConstants())]
        [[2.0], [1.0]]
    """
    counts = []
    for block in _split(spec, old_log_prob, rollout_log_prob, response_mask, segment_ids, versions, staleness):
        found = decide_rollout(
            spec,
            block.rows,
            old=block.old,
            mu=block.mu,
            mask=block.mask,
            ids=block.ids,
            ages=block.ages,
            constants=constants,
            weigh=False,
        )
        counts.append(torch.stack([block.rows.sum(flags).flatten() for flags in (block.mask, found.keep)]))
    tokens, kept = torch.cat(counts, dim=1).unbind()
    return tokens, kept


@dataclass(frozen=True)
class _Block:
    """Whole rows of a batch, as tensors of tokens."""

    rows: RowLayout
    old: Tensor
    mu: Tensor
    mask: Tensor
    ids: dict[Level, Tensor | None]
    ages: Tensor | None


def _split(
    spec: CorrectionSpec,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    segment_ids: Tensor | None,
    versions: Tensor | None,
    staleness: Tensor | None,
) -> Iterator[_Block]:
    by_row = staleness if staleness is not None and staleness.dim() == 1 else None
    given = {
        "old_log_prob": old_log_prob,
        "rollout_log_prob": rollout_log_prob,
        "response_mask": response_mask,
        "segment_ids": segment_ids,
        "versions": versions,
        "staleness": None if by_row is not None else staleness,
    }
    for at, rows, block in split_tokens({name: column for name, column in given.items() if column is not None}):
        mask = block["response_mask"].bool()
        ids = choose_ids(spec, segment_ids=block.get("segment_ids"), versions=block.get("versions"))
        of_rows = None if by_row is None else by_row[at]
        ages = spread_ages(spec, rows, mask, by_row=of_rows, by_token=block.get("staleness"))
        yield _Block(rows, block["old_log_prob"], block["rollout_log_prob"], mask, ids, ages)
