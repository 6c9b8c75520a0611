"""The two stages of a correction.

``rollout_stage`` holds what mu and pi_old decide, once per rollout; ``step_stage`` adds what pi and the advantages
decide, at every gradient step. log(pi/mu) is the sum of the first stage's log(pi_old/mu) and the second stage's
log(pi/pi_old), so OPSM costs one new sum a step.

Tensors are (B, T), or nested by row with layout ``torch.jagged``, all of them in one layout. Nested ones are worked on
as they lie, and what comes out is nested likewise. Nothing waits for the device once ``constants`` are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import telemetry
from .mask_spec import MaskSpec, Ratio
from .masks import compute_second_moment_cutoff, find_applicable, find_outside
from .ratios import clamp_and_exp, compute_finite_log_ratio, compute_log_ratio, promote_weight_dtype
from .row_blocks import split_rows
from .row_layout import RowLayout, detect_layout
from .spec import CorrectionSpec
from .stage_results import BatchConstants, RolloutStage, StepStage
from .statistics import Statistic
from .token_sample import build_sample
from .units import Units, partition_units
from .weight_spec import WeightSpec
from .weights import Bound, apply_bounds, choose_bounds, compute_log_weight, find_rejected_units, sum_weights


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
        >>> weight = WeightSpec("token", "truncate", None, 2.0, normalize=True)
        >>> pi_old, mu = torch.zeros(1, 2), torch.tensor([[0.0, -5.0]])  # weights 1 and min(e^5, 2)
        >>> policies = dict(old_log_prob=pi_old, rollout_log_prob=mu, response_mask=torch.ones(1, 2))
        >>> batch_constants(CorrectionSpec(weight=weight), **policies).weight_mean
        1.5
    """
    if not spec.needs_constants:
        return BatchConstants()
    given = dict(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    by_row = staleness if staleness is not None and staleness.dim() == 1 else None
    others = dict(segment_ids=segment_ids, versions=versions, staleness=None if by_row is not None else staleness)
    columns = given | {name: column for name, column in others.items() if column is not None}
    budgets = {name: mask.budget for name, mask in spec.masks if mask.budget is not None}
    sums: list[Tensor] = []
    log_ratios: list[Tensor] = []
    for at, block in split_rows(columns):
        rows = detect_layout(**{name: block[name] for name in given})
        old, mu, mask = (rows.tokens(block[name]) for name in given)
        valid, log_rho = compute_finite_log_ratio(old, mu, mask.bool())
        if (weight := spec.normalized) is not None:
            ids = _ids(weight.level, rows, block["response_mask"], block.get("segment_ids"), block.get("versions"))
            ages = _ages(spec, rows, block.get("staleness") if by_row is None else by_row[at], valid)
            units = partition_units(weight.level, valid, ids, rows, ages)
            sums.append(torch.stack(sum_weights(weight, log_rho, units)))
        if budgets:
            log_ratios.append(log_rho[valid])
    weight_mean = None
    if sums:
        total, count = torch.stack(sums).sum(0)
        # Where everything is rejected there is nothing to divide.
        weight_mean = float(total / count) if total > 0 else 1.0
    cutoffs = {name: compute_second_moment_cutoff(budget, torch.cat(log_ratios)) for name, budget in budgets.items()}
    return BatchConstants(weight_mean, cutoffs)


def rollout_stage(
    spec: CorrectionSpec,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    segment_ids: Tensor | None = None,
    versions: Tensor | None = None,
    constants: BatchConstants | None = None,
    staleness: Tensor | None = None,
    measure: telemetry.Measure = "all",
    beside: RolloutStage | None = None,
) -> RolloutStage:
    """Compute the weights, masks and statistics that depend on pi_old / mu alone.

    A token whose pi_old is not finite leaves weights, masks, T and statistics, and is counted; so does one whose mu is
    not, unless the correction does not read mu: then it leaves statistics alone.

    Args:
        old_log_prob: (B, T) log pi_old, any float dtype; see ``proximal_log_prob``.
        rollout_log_prob: (B, T) log mu, any float dtype.
        response_mask: (B, T) bool or 0/1; padding is never read.
        segment_ids: (B, T) integers, the turn of each token, see ``units.turns``; for level ``turn``.
        versions: (B, T) integers, the version of the weights that sampled each token; for level ``version``.
        constants: of the batch that these rows belong to; None: these rows are the whole batch.
        staleness: (B,) integers >= 0, versions of the weights between each row's sampling and its use, or (B, T)
            those of each token. Statistics read it, as they read ``segment_ids`` whatever the levels are, and masks
            and bounds that go by age.
        measure: ``all`` statistics, ``decisions``: those of weight and keep, or ``nothing``; in both stages.
        beside: measured stage of another correction for the very same tensors; spares what does not depend on the
            correction.

    Raises:
        ValueError: shapes that differ, a level whose ids are missing, an age that is not known, or a stage of other
            tensors.

    Example:
        >>> spec = CorrectionSpec(weight=WeightSpec("token", "truncate", None, 2.0))
        >>> pi_old, mu = torch.zeros(1, 2), torch.tensor([[0.0, -5.0]])  # ratios 1 and e^5
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> rollout_stage(spec, old_log_prob=pi_old, rollout_log_prob=mu, response_mask=mask).weight.tolist()
        [[1.0, 2.0]]
    """
    given = dict(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    rows = detect_layout(**given)
    ids = {level: _ids(level, rows, response_mask, segment_ids, versions) for level in spec.levels}
    for name, numbers in {"segment_ids": segment_ids, "versions": versions}.items():
        if numbers is not None:
            detect_layout(response_mask=response_mask, **{name: numbers})
            if numbers.dtype == torch.bool or numbers.is_floating_point():
                raise ValueError(f"{name} of dtype {numbers.dtype}: expected integers, one number a unit.")
    if staleness is not None and staleness.dim() == 2:
        detect_layout(response_mask=response_mask, staleness=staleness)
    elif staleness is not None and staleness.shape != (rows.count,):
        raise ValueError(f"staleness of shape {tuple(staleness.shape)}: expected (B,), {(rows.count,)}")
    old, mu = rows.tokens(old_log_prob), rows.tokens(rollout_log_prob)
    mask = rows.tokens(response_mask).bool()
    if beside is None:
        valid, log_rho = compute_finite_log_ratio(old, mu, mask)
    elif beside.old_log_prob is not old_log_prob or beside.rollout_log_prob is not rollout_log_prob:
        raise ValueError("beside is the stage of other tensors: pass the stage of these, or leave it out.")
    else:
        valid, log_rho = rows.tokens(beside.valid), rows.tokens(beside.log_ratio)
    if constants is None and not spec.needs_constants:
        constants = BatchConstants()
    elif constants is None:
        constants = batch_constants(
            spec,
            old_log_prob=old_log_prob,
            rollout_log_prob=rollout_log_prob,
            response_mask=response_mask,
            segment_ids=segment_ids,
            versions=versions,
            staleness=staleness,
        )

    decided = valid if spec.reads_mu else mask & torch.isfinite(old)
    ages = _ages(spec, rows, staleness, decided)
    units = {level: partition_units(level, decided, ids[level], rows, ages) for level in spec.levels}
    dtype = promote_weight_dtype(old, mu)
    weight, weighed = None, None
    keep = decided
    drops: dict[str, Tensor] = {}
    for key, part in _order(spec):
        seen, basis = log_rho, units[part.level]
        if spec.skyrl_compat and part.level != "token":
            # SkyRL aggregates a sequence over the tokens that its token masks have left.
            seen = torch.where(keep, log_rho, 0.0)
            basis = partition_units(part.level, keep, ids[part.level], rows)
        drop: Tensor | None
        if isinstance(part, WeightSpec):
            weighed = _weigh(part, seen, basis, valid, _mean(part, constants), dtype)
            weight, drop = weighed.weight, weighed.drop
        else:
            cutoff = constants.cutoffs.get(key.removeprefix("masks."))
            drop = find_outside(part, seen, basis, numerator=old, denominator=mu, cutoff=cutoff)
        if drop is not None:
            drops[key] = drop
            keep = keep & ~drop

    sample, mismatch = None, None
    statistics: dict[str, Statistic] = {}
    if measure != "nothing":
        sample = None if beside is None else beside.sample
        if sample is None:
            segments = None if segment_ids is None else rows.tokens(segment_ids)
            sample = build_sample(rows, mask, valid, segments, staleness)
        if measure == "all":
            statistics, mismatch = telemetry.measure_rollout(sample, log_rho, old, mu)
        if not any(each.needs_step for each in spec.all_weights.values()):
            statistics |= telemetry.measure_weight(sample, weighed, mismatch.ratio if mismatch else None)
    return RolloutStage(
        spec=spec,
        weight=rows.to_given_layout(decided.to(dtype) if weight is None else weight),
        keep=rows.to_given_layout(keep),
        rejected={key: rows.to_given_layout(drop) for key, drop in drops.items()},
        log_ratio=rows.to_given_layout(log_rho),
        valid=rows.to_given_layout(valid),
        decided=rows.to_given_layout(decided),
        response_mask=rows.to_given_layout(mask),
        old_log_prob=old_log_prob,
        rollout_log_prob=rollout_log_prob,
        rows=rows,
        units=units,
        statistics=statistics,
        sample=sample,
        mismatch=mismatch,
    )


def step_stage(
    spec: CorrectionSpec, stage: RolloutStage, *, log_prob: Tensor, advantages: Tensor | None = None
) -> StepStage:
    """Compute weight and keep of one gradient step.

    Args:
        stage: from ``rollout_stage`` of the same rows.
        log_prob: (B, T) log pi, detached here. The caller stops on a value that is not finite (it is counted in
            ``nonfinite/log_prob``, and advantages likewise): no mask can keep it out of the gradient.
        advantages: (B, T); only signs are used, see ``MaskSpec.sign``. None where no mask looks at them; statistics
            by sign then find no row.

    Raises:
        ValueError: shapes that differ, a stage of another correction, or a mask whose advantages are missing.

    Example:
        >>> spec = CorrectionSpec(masks=(("far", MaskSpec("ppo", "token", "product", 0.5, 2.0, "any")),))
        >>> pi_old, pi = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])  # pi / pi_old = 1 and e
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> stage = rollout_stage(spec, old_log_prob=pi_old, rollout_log_prob=pi_old, response_mask=mask)
        >>> step_stage(spec, stage, log_prob=pi).keep.tolist()
        [[True, False]]
    """
    if spec != stage.spec:
        raise ValueError(
            f"the rollout stage was decided by {stage.spec.to_mapping()}, the step stage is asked for "
            f"{spec.to_mapping()}: run rollout_stage again with the new correction."
        )
    rows = stage.rows
    if advantages is None:
        _no_advantages(spec)
        detect_layout(response_mask=stage.response_mask, log_prob=log_prob)
        signs = torch.zeros_like(rows.tokens(stage.log_ratio))
    else:
        detect_layout(response_mask=stage.response_mask, log_prob=log_prob, advantages=advantages)
        signs = rows.tokens(advantages)
    valid, log_rho = rows.tokens(stage.decided), rows.tokens(stage.log_ratio)
    pi, old, mu = (rows.tokens(tensor) for tensor in (log_prob, stage.old_log_prob, stage.rollout_log_prob))
    all_of_it = stage.mismatch is not None
    log_r = compute_log_ratio(pi, old, valid) if all_of_it or spec.step_parts else None
    operands: dict[Ratio, tuple[Tensor, Tensor, Tensor]] = {"rollout": (log_rho, old, mu)}
    if log_r is not None:
        operands |= {"full": (log_rho + log_r, pi, mu), "ppo": (log_r, pi, old)}

    weight = rows.tokens(stage.weight)
    keep = rows.tokens(stage.keep)
    drops: dict[str, Tensor] = {}
    weighed: list[telemetry.AppliedWeight] = []
    for key, part in spec.all_weights.items():
        if not part.needs_step:
            continue
        applied = _weigh(part, operands[part.ratio][0], stage.units[part.level], valid, 1.0, weight.dtype)
        if part.when != "any":
            applied = applied.restrict(find_applicable(part, signs, valid, rows))
        weight = applied.weight if applied.at is None else torch.where(applied.at, applied.weight, weight)
        if applied.drop is not None:
            drops[key] = applied.drop
            keep = keep & ~applied.drop
        weighed.append(applied)
    for name, mask in spec.masks:
        if mask.needs_step:
            log_value, numerator, denominator = operands[mask.ratio]
            drop = find_outside(mask, log_value, stage.units[mask.level], numerator=numerator, denominator=denominator)
            if mask.when != "any":
                drop = drop & find_applicable(mask, signs, valid, rows, log_ratio=log_value)
            drops[f"masks.{name}"] = drop
            keep = keep & ~drops[f"masks.{name}"]

    statistics, full = dict(stage.statistics), None
    if stage.sample is not None:
        if stage.mismatch is not None:
            counted = rows.tokens(stage.valid)
            ppo_drift, full_drift = (
                drift if spec.reads_mu else torch.where(counted, drift, 0.0)
                for drift in (operands["ppo"][0], operands["full"][0])
            )
            of_step, full = telemetry.measure_step(stage.sample, stage.mismatch, ppo_drift, full_drift, pi, signs)
            statistics |= of_step
            if spec.penalty is not None:
                statistics |= telemetry.measure_penalty(
                    stage.sample, full_drift if spec.penalty.ratio == "full" else ppo_drift
                )
        if weighed and weighed[0].at is None:
            statistics |= telemetry.measure_weight(stage.sample, weighed[0], full)
        elif weighed:
            statistics |= telemetry.measure_weights_by_sign(stage.sample, weighed, raw=full is not None)
        before = {key: rows.tokens(drop) for key, drop in stage.rejected.items()}
        statistics |= telemetry.measure_keep(stage.sample, keep, before | drops, signs)
    return StepStage(
        weight=rows.to_given_layout(weight),
        keep=rows.to_given_layout(keep),
        rejected=stage.rejected | {key: rows.to_given_layout(drop) for key, drop in drops.items()},
        statistics=statistics,
    )


def _order(spec: CorrectionSpec) -> Iterator[tuple[str, WeightSpec | MaskSpec]]:
    """Order the parts that the rollout stage decides, with their keys; the order matters to ``skyrl_compat`` alone."""
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


def _weigh(
    spec: WeightSpec, log_value: Tensor, units: Units, valid: Tensor, mean: float, dtype: torch.dtype
) -> telemetry.AppliedWeight:
    """Compute the raw weight, the bounded weight, and the tokens that it rejects."""
    by_unit = compute_log_weight(spec, log_value, units)
    raw = torch.where(valid, units.spread(clamp_and_exp(by_unit)).to(dtype), 0.0)
    lower, upper = choose_bounds(spec, units)
    bounds = _by_token(lower, units, dtype), _by_token(upper, units, dtype)
    weight = apply_bounds(spec, raw, bounds)
    if spec.lower is not None and spec.kind != "reject":
        # A lower bound has lifted the 0 off valid tokens.
        weight = torch.where(valid, weight, 0.0)
    drop = units.spread(find_rejected_units(spec, by_unit, units)) if spec.kind == "reject" else None
    weight = weight if mean == 1.0 else weight / mean
    return telemetry.AppliedWeight(
        spec=spec, units=units, by_unit=by_unit, raw=raw, weight=weight, drop=drop, bounds=bounds
    )


def _by_token(bound: Bound, units: Units, dtype: torch.dtype) -> Bound:
    return units.spread(bound).to(dtype) if isinstance(bound, Tensor) else bound


def _ages(spec: CorrectionSpec, rows: RowLayout, staleness: Tensor | None, valid: Tensor) -> Tensor | None:
    """Return the age of each token, float64; None where no part reads it, or none is known."""
    if not spec.age_parts or staleness is None:
        return None
    if staleness.dim() == 2:
        return rows.tokens(staleness).double()
    return rows.broadcast(rows.to_column(staleness.to(valid.device).double())).expand(valid.shape)


def _mean(spec: WeightSpec, constants: BatchConstants) -> float:
    if not spec.normalize:
        return 1.0
    if constants.weight_mean is None:
        raise ValueError("weight.normalize divides by the batch's mean: pass the constants of batch_constants.")
    return constants.weight_mean


def _ids(
    level: str, rows: RowLayout, response_mask: Tensor, segment_ids: Tensor | None, versions: Tensor | None
) -> Tensor | None:
    """Return, by token, the ids that separate the units of this level; None where it needs none."""
    ids, name = {"turn": (segment_ids, "segment_ids"), "version": (versions, "versions")}.get(level, (None, ""))
    if name and ids is None:
        raise ValueError(
            f"level={level} without {name}: the tokens of a unit are unknown. Pass {name}, (B, T) integers, "
            f"or set level=sequence."
        )
    if ids is None:
        return None
    detect_layout(response_mask=response_mask, **{name: ids})
    return rows.tokens(ids)


def _no_advantages(spec: CorrectionSpec) -> None:
    parts: dict[str, WeightSpec | MaskSpec] = {f"masks.{name}": mask for name, mask in spec.masks}
    for key, part in (parts | spec.all_weights).items():
        if part.when != "any":
            raise ValueError(
                f"correction.{key}.when={part.when} without advantages: its rows are unknown. "
                f"Pass advantages, (B, T), or set correction.{key}.when=any."
            )
