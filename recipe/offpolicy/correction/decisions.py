"""Decide from mu and pi_old which tokens to keep, compute batch-level constants, and adjust denominators and baselines.

``rollout_stage`` converts the decisions to the layout of the caller's tensors and measures them. ``batch_constants``
and ``count_kept_by_row`` read a whole batch block by block, so that temporaries fit in the CPU's caches.

GRPO, RLOO and OPO compare a row with its siblings. A row that the correction rejects contributes nothing to training,
but its reward changes the advantages of the remaining siblings. ``baseline=exclude`` prevents this by moving each
rejected row to a group of its own before verl's estimator runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from .masks import MaskSpec, Ratio, compute_second_moment_cutoff, find_outside
from .ratios import compute_finite_log_ratio, promote_weight_dtype
from .row_layout import RowLayout, detect_layout, split_tokens
from .spec import CorrectionSpec
from .units import Level, Units, find_applicable, partition_units
from .weights import AppliedWeight, WeightSpec, apply_weight, sum_weights


class Columns(TypedDict):
    """Columns of a rollout: all are (B, T), or all are nested tensors of rows with layout ``torch.jagged``.

    Attributes:
        old_log_prob: log pi_old, any float dtype; see ``proximal_log_prob``.
        rollout_log_prob: log mu, any float dtype.
        response_mask: bool or 0/1; padding is never read.
        segment_ids: integers, the turn of each token, see ``units.turns``. Required by level ``turn`` and by
            ``post_tool``.
        versions: integers, the version of the weights that sampled each token. Required by level ``version``.
        staleness: integers >= 0, per row (B,) or per token: how many versions older than the trainer's weights the
            sampling weights were. Read by masks and bounds that depend on age, and by statistics. Statistics also read
            ``segment_ids``, at any level.
    """

    old_log_prob: Tensor
    rollout_log_prob: Tensor
    response_mask: Tensor
    segment_ids: NotRequired[Tensor | None]
    versions: NotRequired[Tensor | None]
    staleness: NotRequired[Tensor | None]


@dataclass(frozen=True)
class BatchConstants:
    """Batch-level constants, so that the loss does not depend on how the batch is split over micro-batches and ranks.

    Attributes:
        weight_mean: with ``normalize``, the mean by which weights are divided; None otherwise.
        cutoffs: mask name -> largest (log r)^2 that ``second_moment`` keeps.
    """

    weight_mean: float | None = None
    cutoffs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """Rows of a rollout as tensors of tokens, each padded, (B, T), or packed, (N,).

    Attributes:
        rows: layout of the tokens.
        old, mu: log-probs of any float dtype.
        mask: bool, the response mask.
        ids: level -> the unit id of each token; None for a level that needs no ids.
        ages: float64, number of weight versions since each token was sampled; None if no part reads ages or the ages
            are unknown.
        turns: integers, the turn of each token; None if unknown.
    """

    rows: RowLayout
    old: Tensor
    mu: Tensor
    mask: Tensor
    ids: dict[Level, Tensor | None]
    ages: Tensor | None
    turns: Tensor | None

    @classmethod
    def of(cls, spec: CorrectionSpec, rows: RowLayout, tokens: Mapping[str, Tensor], by_row: Tensor | None) -> Rollout:
        """Select the columns that ``spec`` reads.

        Args:
            tokens: ``Columns`` by name, as tensors of tokens.
            by_row: (B,) ages of the rows, if they are not per token.

        Raises:
            ValueError: the ids of a level are missing.
        """
        mask, ages = tokens["response_mask"].bool(), None
        sources = {"turn": "segment_ids", "version": "versions"}
        for level, name in sources.items():
            if level in spec.levels and name not in tokens:
                raise ValueError(
                    f"level={level} needs {name} to assign tokens to units. Pass {name} as (B, T) integers, or set "
                    "level=sequence."
                )
        ids = {level: tokens[sources[level]] if level in sources else None for level in spec.levels}
        if spec.age_parts and "staleness" in tokens:
            ages = tokens["staleness"].double()
        elif spec.age_parts and by_row is not None:
            ages = rows.broadcast(rows.to_column(by_row.to(mask.device).double())).expand(mask.shape)
        turns = tokens.get("segment_ids")
        return cls(rows, tokens["old_log_prob"], tokens["rollout_log_prob"], mask, ids, ages, turns)


@dataclass(frozen=True)
class Verdicts:
    """Decisions of a correction's parts. Each tensor is padded, (B, T), or packed, (N,).

    Attributes:
        keep: bool, tokens that all parts keep.
        drops: key under ``correction`` -> bool, the tokens that this part rejects.
        weighed: the weights that were applied.
    """

    keep: Tensor
    drops: dict[str, Tensor]
    weighed: list[AppliedWeight]


Operands = Mapping[Ratio, tuple[Tensor, Tensor, Tensor]]
"""Maps the name of a ratio to its log per token, and to the log-probs of its two policies."""


def apply_parts(
    parts: Mapping[str, WeightSpec | MaskSpec],
    operands: Operands,
    units: Mapping[Level, Units],
    valid: Tensor,
    keep: Tensor,
    dtype: torch.dtype,
    *,
    constants: BatchConstants,
    advantages: Tensor | None = None,
    turns: Tensor | None = None,
    partition_kept: Callable[[Level, Tensor], Units] | None = None,
) -> Verdicts:
    """Apply weights and masks one after the other.

    Args:
        keep: tokens that are kept so far.
        dtype: dtype of the weights.
        advantages, turns: per token; needed by parts that apply only to some tokens.
        partition_kept: for ``skyrl_compat``, where a sequence is aggregated only over the tokens that are kept so far.

    Example:
        >>> far = MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")
        >>> log_ratio, valid = torch.tensor([[0.0, 1.0]]).double(), torch.ones(1, 2, dtype=torch.bool)
        >>> operands = {"rollout": (log_ratio, log_ratio, log_ratio)}
        >>> units = {"token": partition_units("token", valid, None)}
        >>> whole = BatchConstants()
        >>> apply_parts({"masks.far": far}, operands, units, valid, valid, torch.float32, constants=whole).keep.tolist()
        [[True, False]]
    """
    drops: dict[str, Tensor] = {}
    weighed: list[AppliedWeight] = []
    for key, part in parts.items():
        log_value, numerator, denominator = operands[part.ratio]
        basis = units[part.level]
        if partition_kept is not None and part.level != "token":
            log_value, basis = torch.where(keep, log_value, 0.0), partition_kept(part.level, keep)
        at = None
        if part.when != "any":
            at = find_applicable(part, advantages, valid, basis.rows, log_ratio=log_value, turns=turns)
        drop: Tensor | None
        if isinstance(part, MaskSpec):
            cutoff = constants.cutoffs.get(key.removeprefix("masks."))
            drop = find_outside(part, log_value, basis, numerator=numerator, denominator=denominator, cutoff=cutoff)
            drop = drop if at is None else drop & at
        else:
            mean = constants.weight_mean if part.normalize else 1.0
            if mean is None:
                raise ValueError("weight.normalize divides by the batch's mean. Pass the result of batch_constants.")
            applied = apply_weight(part, log_value, basis, valid, mean, dtype)
            weighed.append(applied if at is None else applied.restrict(at))
            drop = weighed[-1].drop
        if drop is not None:
            drops[key] = drop
            keep = keep & ~drop
    return Verdicts(keep, drops, weighed)


@dataclass(frozen=True)
class Decisions(Verdicts):
    """Decisions from mu and pi_old. Each tensor is padded, (B, T), or packed, (N,).

    Attributes:
        log_ratio: log(pi_old / mu), 0 outside ``valid``.
        valid: bool, the response mask without tokens whose mu or pi_old is not finite.
        decided: bool, the tokens on which the correction decides: the valid tokens. If the correction does not read mu,
            they include tokens for which only mu is not finite.
        units: level -> the units on which the correction decides.
        dtype: dtype of the weights.
    """

    log_ratio: Tensor
    valid: Tensor
    decided: Tensor
    units: dict[Level, Units]
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The weight of each token, detached: 0 outside ``decided``, and 1 if no weight has been applied."""
        return self.weighed[0].weight if self.weighed else self.decided.to(self.dtype)


def decide_rollout(
    spec: CorrectionSpec,
    rollout: Rollout,
    constants: BatchConstants,
    compared: tuple[Tensor, Tensor] | None = None,
    weigh: bool = True,
) -> Decisions:
    """Decide from mu and pi_old which tokens are kept, and their weights.

    Args:
        constants: constants of the whole batch.
        compared: valid tokens and log(pi_old / mu), if already computed.
        weigh: also compute weights that reject nothing.

    Example:
        >>> spec = CorrectionSpec(masks=(("far", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")),))
        >>> pi_old, mu = torch.zeros(1, 2), torch.tensor([[0.0, -1.0]])  # ratios 1 and e
        >>> columns = dict(old_log_prob=pi_old, rollout_log_prob=mu, response_mask=torch.ones(1, 2))
        >>> rollout = Rollout.of(spec, detect_layout(**columns), columns, None)
        >>> decide_rollout(spec, rollout, BatchConstants()).keep.tolist()
        [[True, False]]
    """
    rows, old, mu, ids = rollout.rows, rollout.old, rollout.mu, rollout.ids
    dtype = promote_weight_dtype(old, mu)
    valid, log_rho = compute_finite_log_ratio(old, mu, rollout.mask) if compared is None else compared
    decided = valid if spec.reads_mu else rollout.mask & torch.isfinite(old)
    units = {level: partition_units(level, decided, ids[level], rows, rollout.ages) for level in spec.levels}

    def partition_kept(level: Level, keep: Tensor) -> Units:
        return partition_units(level, keep, ids[level], rows)

    found = apply_parts(
        spec.rollout_parts if weigh else spec.rollout_rejects,
        {"rollout": (log_rho, old, mu)},
        units,
        valid,
        decided,
        dtype,
        constants=constants,
        partition_kept=partition_kept if spec.skyrl_compat else None,
    )
    return Decisions(found.keep, found.drops, found.weighed, log_rho, valid, decided, units, dtype)


def batch_constants(spec: CorrectionSpec, **columns: Unpack[Columns]) -> BatchConstants:
    """Compute the batch-level constants of ``spec`` from the columns of all rows of the batch.

    Example:
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
    for block in _split(spec, columns):
        valid, log_rho = compute_finite_log_ratio(block.old, block.mu, block.mask)
        if (weight := spec.normalized) is not None:
            units = partition_units(weight.level, valid, block.ids[weight.level], block.rows, block.ages)
            sums.append(torch.stack(sum_weights(weight, log_rho, units)))
        if budgets:
            log_ratios.append(log_rho[valid])
    weight_mean = None
    if sums:
        total, count = torch.stack(sums).sum(0)
        # If everything is rejected, there are no weights to divide.
        weight_mean = float(total / count) if total > 0 else 1.0
    cutoffs = {name: compute_second_moment_cutoff(budget, *log_ratios) for name, budget in budgets.items()}
    return BatchConstants(weight_mean, cutoffs)


def count_kept_by_row(
    spec: CorrectionSpec, constants: BatchConstants, **columns: Unpack[Columns]
) -> tuple[Tensor, Tensor]:
    """Count each row's response tokens, and how many of them the rollout stage keeps: (B,) float64 each.

    Example:
        >>> spec = CorrectionSpec(masks=(("far", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")),))
        >>> pi_old, mu = torch.zeros(1, 3), torch.tensor([[0.0, -1.0, -1.0]])  # ratios 1, e and e
        >>> columns = dict(old_log_prob=pi_old, rollout_log_prob=mu, response_mask=torch.tensor([[1, 1, 0]]))
        >>> [count.tolist() for count in count_kept_by_row(spec, BatchConstants(), **columns)]
        [[2.0], [1.0]]
    """
    counts = []
    for block in _split(spec, columns):
        found = decide_rollout(spec, block, constants, weigh=False)
        counts.append(torch.stack([block.rows.sum(flags).flatten() for flags in (block.mask, found.keep)]))
    tokens, kept = torch.cat(counts, dim=1).unbind()
    return tokens, kept


def _split(spec: CorrectionSpec, columns: Columns) -> Iterator[Rollout]:
    """Split the columns into blocks of whole rows."""
    given: dict[str, Any] = {name: column for name, column in columns.items() if column is not None}
    by_row = given.pop("staleness") if "staleness" in given and given["staleness"].dim() == 1 else None
    for at, rows, tokens in split_tokens(given):
        yield Rollout.of(spec, rows, tokens, None if by_row is None else by_row[at])


HAS_DENOMINATOR = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""Values of verl's ``loss_agg_mode`` that divide by a count; ``token-sum`` does not divide."""


def compute_scale_of_counts(
    mode: str, *, tokens: Tensor, kept: Tensor, mini_batch: Tensor, mini_batch_rows: int
) -> Tensor:
    """Compute each row's loss factor, which replaces the original denominator with a count of kept tokens or rows.

    If R of N counted tokens or rows are rejected, the factor is N / (N - R). Rejected tokens are removed from the
    mini-batch's token count, and rows without a kept token from its row count. For ``seq-mean-token-mean``, rejected
    tokens are also removed from their row's T. If nothing is rejected, the factor is exactly 1.

    Args:
        mode: verl's ``loss_agg_mode``, one of ``HAS_DENOMINATOR``.
        tokens, kept: (B,) float64 each, the numbers of response tokens and of kept tokens in each row of the batch.
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
    """Flag the response tokens whose mu is finite: bool, in the layout of the arguments.

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
        The new group of each row, and whether the row's advantage must be set to 0. This applies to a rejected row,
        which contributes nothing to training, and to the last remaining row of a larger group, which has no sibling
        left to be compared with.

    Example:
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
