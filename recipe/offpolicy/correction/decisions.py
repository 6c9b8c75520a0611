"""Decisions of the rollout stage from mu and pi_old, per token and over the whole batch.

``rollout_stage`` converts them to the layout of the caller's tensors and measures them. ``batch_constants`` and
``count_kept_by_row`` read a whole batch block by block, so that temporaries fit in the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .mask_spec import MaskSpec
from .masks import compute_second_moment_cutoff, find_outside
from .ratios import clamp_and_exp, compute_finite_log_ratio, promote_weight_dtype
from .row_layout import RowLayout, split_tokens
from .spec import CorrectionSpec
from .statistics import Statistic
from .telemetry import AppliedWeight, Mismatch
from .token_sample import TokenSample
from .units import Level, Units, partition_units
from .weights import (
    Bound,
    WeightSpec,
    apply_bounds,
    choose_bounds,
    compute_log_weight,
    find_rejected_units,
    sum_weights,
)


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
class RolloutStage:
    """Decisions from mu and pi_old, in the layout of the given tensors: (B, T), or nested by row.

    Attributes:
        spec: the correction; the step stage must use the same correction.
        weight: (B, T) float32 or wider, detached, 0 outside ``decided``; 1 if the weight needs the current policy.
        keep: (B, T) bool, False outside ``decided``, and for tokens that a part rejects without needing pi or
            advantages.
        rejected: key, under ``correction``, of each part that this stage decides -> (B, T) bool, the tokens that the
            part rejects.
        log_ratio: (B, T) log(pi_old / mu), 0 outside ``valid``.
        valid: (B, T) bool, the response mask without tokens whose mu or pi_old is not finite.
        decided: (B, T) bool, the tokens on which the correction decides: ``valid``, and, for a correction that does not
            read mu, also tokens for which only mu is not finite.
        response_mask: (B, T) bool, as given.
        old_log_prob, rollout_log_prob: (B, T), as given.
        rows: layout of all these tensors.
        units: level -> the units on which the correction decides.
        statistics: name -> typed statistic, see ``statistics``.
        sample, mismatch: inputs of the step stage's statistics; None if nothing is measured.
    """

    spec: CorrectionSpec
    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]
    log_ratio: Tensor
    valid: Tensor
    decided: Tensor
    response_mask: Tensor
    old_log_prob: Tensor
    rollout_log_prob: Tensor
    rows: RowLayout
    units: dict[Level, Units]
    statistics: dict[str, Statistic]
    sample: TokenSample | None = None
    mismatch: Mismatch | None = None
    segment_ids: Tensor | None = None


@dataclass(frozen=True)
class StepStage:
    """Weights and kept tokens of one gradient step, in the layout of the given tensors: (B, T), or nested by row.

    Attributes:
        weight: (B, T) float32 or wider, detached; never multiplied by ``keep``; 0 outside the response mask.
        keep: (B, T) bool; False outside the response mask.
        rejected: key of the part -> (B, T) bool, the tokens that the part rejects; meaningless outside the stage's
            ``valid``.
        statistics: name -> typed statistic, including those of the rollout stage.
    """

    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]
    statistics: dict[str, Statistic]


@dataclass(frozen=True)
class Decisions:
    """Weights, kept tokens and rejected tokens of a rollout; each tensor is (B, T) padded or (N,) packed.

    Attributes:
        log_ratio, valid, decided, keep, units: see ``RolloutStage``.
        weighed: the weight; None if there is no weight, if it needs the current policy or advantages, or if it was not
            requested.
        drops: see ``RolloutStage.rejected``.
    """

    log_ratio: Tensor
    valid: Tensor
    decided: Tensor
    keep: Tensor
    units: dict[Level, Units]
    weighed: AppliedWeight | None
    drops: dict[str, Tensor]


def decide_rollout(
    spec: CorrectionSpec,
    rows: RowLayout,
    *,
    old: Tensor,
    mu: Tensor,
    mask: Tensor,
    ids: Mapping[Level, Tensor | None],
    ages: Tensor | None,
    constants: BatchConstants,
    compared: tuple[Tensor, Tensor] | None = None,
    weigh: bool = True,
) -> Decisions:
    """Decide from mu and pi_old which tokens are kept, and their weights; each tensor is (B, T) padded or (N,) packed.

    Args:
        rows: layout of the tokens.
        old, mu: log-probs of any float dtype.
        mask: bool, the response mask.
        ids: from ``choose_ids``.
        ages: from ``spread_ages``.
        constants: constants of the whole batch.
        compared: valid tokens and log(pi_old / mu), if they are known.
        weigh: also compute weights that reject nothing.

    Example:
        >>> from .row_layout import detect_layout
        >>> spec = CorrectionSpec(masks=(("far", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")),))
        >>> pi_old, mu = torch.zeros(1, 2), torch.tensor([[0.0, -1.0]])  # ratios 1 and e
        >>> policies = dict(old=pi_old, mu=mu, mask=torch.ones(1, 2, dtype=torch.bool))
        >>> ids = choose_ids(spec, segment_ids=None, versions=None)
        >>> of_batch = dict(ids=ids, ages=None, constants=BatchConstants())
        >>> decide_rollout(spec, detect_layout(mu=mu), **policies, **of_batch).keep.tolist()
        [[True, False]]
    """
    valid, log_rho = compute_finite_log_ratio(old, mu, mask) if compared is None else compared
    decided = valid if spec.reads_mu else mask & torch.isfinite(old)
    units = {level: partition_units(level, decided, ids[level], rows, ages) for level in spec.levels}
    weighed = None
    keep = decided
    drops: dict[str, Tensor] = {}
    for key, part in _order(spec):
        seen, basis = log_rho, units[part.level]
        if spec.skyrl_compat and part.level != "token":
            # SkyRL aggregates a sequence only over the tokens that SkyRL's token masks keep.
            seen = torch.where(keep, log_rho, 0.0)
            basis = partition_units(part.level, keep, ids[part.level], rows)
        drop: Tensor | None
        if isinstance(part, WeightSpec):
            if not weigh and part.kind != "reject":
                continue
            dtype = promote_weight_dtype(old, mu)
            weighed = apply_weight(part, seen, basis, valid, _read_mean(part, constants), dtype)
            drop = weighed.drop
        else:
            cutoff = constants.cutoffs.get(key.removeprefix("masks."))
            drop = find_outside(part, seen, basis, numerator=old, denominator=mu, cutoff=cutoff)
        if drop is not None:
            drops[key] = drop
            keep = keep & ~drop
    return Decisions(log_rho, valid, decided, keep, units, weighed, drops)


def apply_weight(
    spec: WeightSpec, log_value: Tensor, units: Units, valid: Tensor, mean: float, dtype: torch.dtype
) -> AppliedWeight:
    """Compute the raw weight, the bounded weight divided by ``mean``, and the tokens that the weight rejects.

    Example:
        >>> spec, valid = WeightSpec("token", "truncate", None, 2.0), torch.ones(1, 2, dtype=torch.bool)
        >>> log_r, units = torch.tensor([[0.0, 5.0]]).double(), partition_units("token", valid, None)
        >>> apply_weight(spec, log_r, units, valid, 1.0, torch.float32).weight.tolist()
        [[1.0, 2.0]]
    """
    by_unit = compute_log_weight(spec, log_value, units)
    raw = torch.where(valid, units.spread(clamp_and_exp(by_unit)).to(dtype), 0.0)
    lower, upper = choose_bounds(spec, units)
    bounds = _by_token(lower, units, dtype), _by_token(upper, units, dtype)
    weight = apply_bounds(spec, raw, bounds)
    if spec.lower is not None and spec.kind != "reject":
        # The lower bound may have raised the weights of invalid tokens above 0.
        weight = torch.where(valid, weight, 0.0)
    drop = units.spread(find_rejected_units(spec, by_unit, units)) if spec.kind == "reject" else None
    weight = weight if mean == 1.0 else weight / mean
    return AppliedWeight(spec=spec, units=units, by_unit=by_unit, raw=raw, weight=weight, drop=drop, bounds=bounds)


def choose_ids(
    spec: CorrectionSpec, *, segment_ids: Tensor | None, versions: Tensor | None
) -> dict[Level, Tensor | None]:
    """Choose, for each level of ``spec``, the token ids that separate its units; None for a level that needs no ids.

    Raises:
        ValueError: the ids of a level are missing.

    Example:
        >>> spec = CorrectionSpec(weight=WeightSpec("turn", "truncate", None, 2.0))
        >>> choose_ids(spec, segment_ids=torch.tensor([[0, 1]]), versions=None)
        {'turn': tensor([[0, 1]])}
    """
    known = {"turn": ("segment_ids", segment_ids), "version": ("versions", versions)}
    for level, (name, ids) in known.items():
        if level in spec.levels and ids is None:
            raise ValueError(
                f"level={level} without {name}: the tokens of a unit are unknown. Pass {name}, (B, T) integers, "
                f"or set level=sequence."
            )
    return {level: known[level][1] if level in known else None for level in spec.levels}


def spread_ages(
    spec: CorrectionSpec, rows: RowLayout, like: Tensor, *, by_row: Tensor | None, by_token: Tensor | None
) -> Tensor | None:
    """Spread ages over tokens, float64 in the shape of ``like``; None if no part reads ages or the ages are unknown.

    Example:
        >>> from .row_layout import detect_layout
        >>> old = MaskSpec("rollout", "sequence", "staleness", None, 4.0, "any")
        >>> spec, like = CorrectionSpec(masks=(("old", old),)), torch.zeros(2, 2)
        >>> spread_ages(spec, detect_layout(like=like), like, by_row=torch.tensor([0, 3]), by_token=None).tolist()
        [[0.0, 0.0], [3.0, 3.0]]
    """
    if not spec.age_parts:
        return None
    if by_token is not None:
        return by_token.double()
    if by_row is None:
        return None
    return rows.broadcast(rows.to_column(by_row.to(like.device).double())).expand(like.shape)


def _order(spec: CorrectionSpec) -> Iterator[tuple[str, WeightSpec | MaskSpec]]:
    """Return the rollout stage's parts with their keys, in an order that matters only for ``skyrl_compat``."""
    parts: list[tuple[str, WeightSpec | MaskSpec]] = [
        (f"masks.{name}", mask) for name, mask in spec.masks if not mask.needs_step
    ]
    parts += [(key, weight) for key, weight in spec.all_weights.items() if not weight.needs_step]

    def place(item: tuple[str, WeightSpec | MaskSpec]) -> int:
        _, part = item
        if isinstance(part, WeightSpec):
            return 2
        if part.level == "token":
            return 1
        return 0 if part.aggregate == "any" else 3

    return iter(sorted(parts, key=place))


def _by_token(bound: Bound, units: Units, dtype: torch.dtype) -> Bound:
    return units.spread(bound).to(dtype) if isinstance(bound, Tensor) else bound


def _read_mean(spec: WeightSpec, constants: BatchConstants) -> float:
    if not spec.normalize:
        return 1.0
    if constants.weight_mean is None:
        raise ValueError(
            "weight.normalize divides by the batch's mean: pass the constants that batch_constants returns."
        )
    return constants.weight_mean


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
        # If everything is rejected, there are no weights to divide.
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
    """Count each row's response tokens, and those that the rollout stage keeps, (B,) float64; see ``rollout_stage``.

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
