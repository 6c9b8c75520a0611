"""The two stages of a correction.

``rollout_stage`` holds what mu and pi_old decide, once per rollout; ``step_stage`` adds what pi and the advantages
decide, at every gradient step. log(pi/mu) is the sum of the first stage's log(pi_old/mu) and the second stage's
log(pi/pi_old), so OPSM costs one new sum a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import telemetry
from .mask_spec import MaskSpec
from .masks import applies, outside, second_moment_cutoff
from .ratios import exp_clamped, log_ratio, valid_tokens, weight_dtype
from .spec import CorrectionSpec
from .statistics import Statistic
from .units import Level, Units, units_of
from .weight_spec import WeightSpec
from .weights import bounded, log_weight, mean_weight, rejected


@dataclass(frozen=True)
class BatchConstants:
    """What is fixed for a whole batch, so that no split of it into micro-batches or over ranks can matter.

    Attributes:
        weight_mean: with ``normalize``, what weights are divided by; None otherwise.
        cutoffs: mask name -> the greatest (log r)^2 that ``second_moment`` keeps.
    """

    weight_mean: float | None = None
    cutoffs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutStage:
    """What mu and pi_old decide.

    Attributes:
        spec: the correction that decided; the step stage must be of the same.
        weight: (B, T) float32 or wider, detached, 0 off ``valid``; 1 where the weight waits for the current policy.
        keep: (B, T) bool, False off ``valid`` and where a weight or mask that needs neither pi nor advantages rejects.
        rejected: what rejected it -> (B, T) bool, for the parts decided here, under the keys of the correction.
        log_ratio: (B, T) log(pi_old / mu), 0 off ``valid``.
        valid: (B, T) bool, the response mask less tokens whose mu or pi_old is not finite.
        response_mask: (B, T) bool, as given.
        old_log_prob, rollout_log_prob: (B, T), as given.
        units: level -> the units that the correction decides by.
        statistics: name -> typed statistic, see ``catalogue``.
        sample, mismatch: what the statistics of the step stage go by; None where nothing is measured.
    """

    spec: CorrectionSpec
    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]
    log_ratio: Tensor
    valid: Tensor
    response_mask: Tensor
    old_log_prob: Tensor
    rollout_log_prob: Tensor
    units: dict[Level, Units]
    statistics: dict[str, Statistic]
    sample: telemetry.Sample | None = None
    mismatch: telemetry.Mismatch | None = None


@dataclass(frozen=True)
class StepStage:
    """What one gradient step uses.

    Attributes:
        weight: (B, T) float32 or wider, detached; never multiplied by ``keep``; 0 off the response mask.
        keep: (B, T) bool; False off the response mask.
        rejected: what rejected it -> (B, T) bool, without meaning off the stage's ``valid``.
        statistics: name -> typed statistic, those of the rollout stage included.
    """

    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]
    statistics: dict[str, Statistic]


def batch_constants(
    spec: CorrectionSpec,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    segment_ids: Tensor | None = None,
    versions: Tensor | None = None,
) -> BatchConstants:
    """What ``spec`` fixes for the whole batch, from tensors that hold all of its rows; see ``rollout_stage``."""
    valid = valid_tokens(response_mask, old_log_prob, rollout_log_prob)
    log_rho = log_ratio(old_log_prob, rollout_log_prob, valid)
    weight_mean = None
    if spec.weight is not None and spec.weight.normalize:
        ids = _ids(spec.weight.level, segment_ids, versions)
        total, count = mean_weight(spec.weight, log_rho, units_of(spec.weight.level, valid, ids))
        weight_mean = float(total / count) if total > 0 else 1.0
    return BatchConstants(
        weight_mean,
        {
            name: second_moment_cutoff(mask.budget, log_rho, valid)
            for name, mask in spec.masks
            if mask.budget is not None
        },
    )


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
) -> RolloutStage:
    """Weights, masks and statistics that depend on pi_old / mu alone.

    A token whose mu or pi_old is not finite leaves weights, masks, T and statistics, and is counted.

    Args:
        old_log_prob: (B, T) log pi_old, any float dtype; see ``proximal_log_prob``.
        rollout_log_prob: (B, T) log mu, any float dtype.
        response_mask: (B, T) bool or 0/1; padding is never read.
        segment_ids: (B, T) integers, the turn of each token, see ``units.turns``; for level ``turn``.
        versions: (B, T) integers, the version of the weights that sampled each token; for level ``version``.
        constants: of the batch that these rows belong to; None: these rows are the whole batch.
        staleness: (B,) integers >= 0, versions of the weights between each row's sampling and its use; statistics
            alone read it, as they read ``segment_ids`` whatever the levels are.
        measure: ``all`` statistics, ``decisions``: those of weight and keep, or ``nothing``; in both stages.

    Raises:
        ValueError: shapes that differ, or a level whose ids are missing.
    """
    _same_shape(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    ids = {level: _ids(level, segment_ids, versions) for level in spec.levels}
    for name, given in {"segment_ids": segment_ids, "versions": versions}.items():
        if given is not None:
            _same_shape(response_mask=response_mask, **{name: given})
            if given.dtype == torch.bool or given.is_floating_point():
                raise ValueError(f"{name} of dtype {given.dtype}: expected integers, one number a unit.")
    if staleness is not None and staleness.shape != response_mask.shape[:1]:
        raise ValueError(
            f"staleness of shape {tuple(staleness.shape)}: expected (B,), {tuple(response_mask.shape[:1])}"
        )
    mask = response_mask.bool()
    valid = valid_tokens(mask, old_log_prob, rollout_log_prob)
    log_rho = log_ratio(old_log_prob, rollout_log_prob, valid)
    if constants is None and not spec.needs_constants:
        constants = BatchConstants()
    elif constants is None:
        constants = batch_constants(
            spec,
            old_log_prob=old_log_prob,
            rollout_log_prob=rollout_log_prob,
            response_mask=mask,
            segment_ids=segment_ids,
            versions=versions,
        )

    units = {level: units_of(level, valid, ids[level]) for level in spec.levels}
    dtype = weight_dtype(old_log_prob, rollout_log_prob)
    weight, weighed = valid.to(dtype), None
    keep, drops = valid, dict[str, Tensor]()
    for key, part in _order(spec):
        seen, basis = log_rho, units[part.level]
        if spec.skyrl_compat and part.level != "token":
            seen = torch.where(keep, log_rho, torch.zeros_like(log_rho))
            basis = units_of(part.level, keep, ids[part.level])
        if isinstance(part, WeightSpec):
            weighed = _weigh(part, seen, basis, valid, _mean(part, constants), dtype)
            weight, drop = weighed.weight, weighed.drop
        else:
            cutoff = constants.cutoffs.get(key.removeprefix("masks."))
            drop = outside(part, seen, basis, numerator=old_log_prob, denominator=rollout_log_prob, cutoff=cutoff)
        if isinstance(part, MaskSpec) or part.kind == "reject":
            drops[key] = drop
            keep = keep & ~drop

    sample, mismatch, statistics = None, None, dict[str, Statistic]()
    if measure != "nothing":
        sample = telemetry.sample(mask, valid, log_rho.dtype, segment_ids, staleness)
        if measure == "all":
            statistics, mismatch = telemetry.of_rollout(sample, log_rho, old_log_prob, rollout_log_prob)
        if spec.weight is None or not spec.weight.needs_step:
            statistics |= telemetry.of_weight(sample, spec.weight, weighed, mismatch.ratio if mismatch else None)
    return RolloutStage(
        spec=spec,
        weight=weight,
        keep=keep,
        rejected=drops,
        log_ratio=log_rho,
        valid=valid,
        response_mask=mask,
        old_log_prob=old_log_prob,
        rollout_log_prob=rollout_log_prob,
        units=units,
        statistics=statistics,
        sample=sample,
        mismatch=mismatch,
    )


def step_stage(
    spec: CorrectionSpec, stage: RolloutStage, *, log_prob: Tensor, advantages: Tensor | None = None
) -> StepStage:
    """Weight and keep of one gradient step.

    Args:
        stage: from ``rollout_stage`` of the same rows.
        log_prob: (B, T) log pi, detached here. The caller stops on a value that is not finite (it is counted in
            ``nonfinite/log_prob``, and advantages likewise): no mask can keep it out of the gradient.
        advantages: (B, T); only signs are used, see ``MaskSpec.sign``. None where no mask looks at them; statistics
            by sign then find no row.

    Raises:
        ValueError: shapes that differ, a stage of another correction, or a mask whose advantages are missing.
    """
    if spec != stage.spec:
        raise ValueError(
            f"the rollout stage was decided by {stage.spec.to_mapping()}, the step stage is asked for "
            f"{spec.to_mapping()}: run rollout_stage again with the new correction."
        )
    if advantages is None:
        advantages = _no_advantages(spec, stage)
    _same_shape(response_mask=stage.response_mask, log_prob=log_prob, advantages=advantages)
    valid = stage.valid
    log_r = log_ratio(log_prob, stage.old_log_prob, valid)
    log_full = stage.log_ratio + log_r
    operands = {
        "rollout": (stage.log_ratio, stage.old_log_prob, stage.rollout_log_prob),
        "full": (log_full, log_prob, stage.rollout_log_prob),
        "ppo": (log_r, log_prob, stage.old_log_prob),
    }

    weight, weighed, drops, keep = stage.weight, None, dict(stage.rejected), stage.keep
    if spec.weight is not None and spec.weight.needs_step:
        weighed = _weigh(spec.weight, log_full, stage.units[spec.weight.level], valid, 1.0, stage.weight.dtype)
        weight = weighed.weight
        if spec.weight.kind == "reject":
            drops["weight"] = weighed.drop
            keep = keep & ~weighed.drop
    for name, mask in spec.masks:
        if mask.needs_step:
            log_value, numerator, denominator = operands[mask.ratio]
            units = stage.units[mask.level]
            beyond = outside(mask, log_value, units, numerator=numerator, denominator=denominator)
            drops[f"masks.{name}"] = beyond & applies(mask, advantages, valid)
            keep = keep & ~drops[f"masks.{name}"]

    statistics, full = dict(stage.statistics), None
    if stage.sample is not None:
        if stage.mismatch is not None:
            of_step, full = telemetry.of_step(stage.sample, stage.mismatch, log_r, log_full, log_prob, advantages)
            statistics |= of_step
        if weighed is not None:
            statistics |= telemetry.of_weight(stage.sample, spec.weight, weighed, full)
        statistics |= telemetry.of_keep(stage.sample, keep, drops, advantages)
    return StepStage(weight=weight, keep=keep, rejected=drops, statistics=statistics)


def _order(spec: CorrectionSpec) -> Iterator[tuple[str, WeightSpec | MaskSpec]]:
    """Parts that the rollout stage decides, with their keys. The order matters to SkyRL alone."""
    parts: list[tuple[str, WeightSpec | MaskSpec]] = [
        (f"masks.{name}", mask) for name, mask in spec.masks if not mask.needs_step
    ]
    if spec.weight is not None and not spec.weight.needs_step:
        parts.append(("weight", spec.weight))

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
) -> telemetry.Weighed:
    """Raw weight, bounded weight, and what it rejects."""
    by_unit = log_weight(spec, log_value, units)
    zero = torch.zeros((), dtype=dtype, device=log_value.device)
    raw = torch.where(valid, units.spread(exp_clamped(by_unit)).to(dtype), zero)
    weight = torch.where(valid, bounded(spec, raw), zero)
    return telemetry.Weighed(
        units=units, by_unit=by_unit, raw=raw, weight=weight / mean, drop=units.spread(rejected(spec, by_unit))
    )


def _mean(spec: WeightSpec, constants: BatchConstants) -> float:
    if not spec.normalize:
        return 1.0
    if constants.weight_mean is None:
        raise ValueError("weight.normalize divides by the batch's mean: pass the constants of batch_constants.")
    return constants.weight_mean


def _ids(level: str, segment_ids: Tensor | None, versions: Tensor | None) -> Tensor | None:
    ids, name = {"turn": (segment_ids, "segment_ids"), "version": (versions, "versions")}.get(level, (None, ""))
    if name and ids is None:
        raise ValueError(
            f"level={level} without {name}: nothing says which tokens belong together. Pass {name}, (B, T) integers, "
            f"or set level=sequence."
        )
    return ids


def _no_advantages(spec: CorrectionSpec, stage: RolloutStage) -> Tensor:
    for name, mask in spec.masks:
        if mask.when != "any":
            raise ValueError(
                f"correction.masks.{name}.when={mask.when} without advantages: nothing says which rows it looks at. "
                f"Pass advantages, (B, T), or set correction.masks.{name}.when=any."
            )
    return torch.zeros_like(stage.log_ratio)


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"expected tensors of one shape (B, T), got {shapes}")
