"""The two stages of a correction.

``rollout_stage`` makes the decisions that depend only on mu and pi_old, once per rollout. ``step_stage`` adds those
that need pi or the advantages, at every gradient step. log(pi/mu) is the sum of the first stage's log(pi_old/mu) and
the second stage's log(pi/pi_old), so OPSM costs one new sum per step.

Tensors are (B, T), or nested by row with layout ``torch.jagged``, all in the same layout. Nested tensors are processed
without padding, and the results are nested too. Nothing waits for the device if ``constants`` are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import telemetry
from .decisions import (
    BatchConstants,
    RolloutStage,
    StepStage,
    apply_weight,
    batch_constants,
    choose_ids,
    decide_rollout,
    spread_ages,
)
from .mask_spec import MaskSpec, Ratio
from .masks import find_applicable, find_outside
from .ratios import compute_log_ratio, promote_weight_dtype
from .row_layout import detect_layout
from .spec import CorrectionSpec
from .statistics import Statistic
from .token_sample import build_sample
from .weights import WeightSpec


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
    alongside: RolloutStage | None = None,
) -> RolloutStage:
    """Compute the weights, masks and statistics that depend only on pi_old / mu.

    A token whose pi_old is not finite is excluded from weights, masks, T and statistics, and is counted. The same
    applies to a token whose mu is not finite. However, if the correction does not read mu, such a token is excluded
    only from statistics of ratios.

    Args:
        old_log_prob: (B, T) log pi_old, any float dtype; see ``proximal_log_prob``.
        rollout_log_prob: (B, T) log mu, any float dtype.
        response_mask: (B, T) bool or 0/1; padding is never read.
        segment_ids: (B, T) integers, the turn of each token, see ``units.turns``; for level ``turn`` and ``post_tool``.
        versions: (B, T) integers, the version of the weights that sampled each token; for level ``version``.
        constants: constants of the batch to which these rows belong; None: these rows are the whole batch.
        staleness: (B,) integers >= 0, versions of the weights between each row's sampling and its use, or (B, T) per
            token. It is read by masks and bounds that depend on age, and by statistics, which also read ``segment_ids``
            at any level.
        measure: ``all`` statistics, ``decisions`` for only the statistics of weights and kept tokens, or ``nothing``;
            applies to both stages.
        alongside: measured stage of another correction for the same tensors; results that do not depend on the
            correction are reused.

    Raises:
        ValueError: shapes differ, the ids of a level are missing, an age is unknown, or ``alongside`` belongs to other
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
    numbers = {"segment_ids": segment_ids, "versions": versions}
    for name, column in numbers.items():
        if column is not None:
            detect_layout(response_mask=response_mask, **{name: column})
            if column.dtype == torch.bool or column.is_floating_point():
                raise ValueError(f"{name} of dtype {column.dtype}: expected integers, one number per unit.")
    by_token = staleness if staleness is not None and staleness.dim() == 2 else None
    if by_token is not None:
        detect_layout(response_mask=response_mask, staleness=by_token)
    elif staleness is not None and staleness.shape != (rows.count,):
        raise ValueError(f"staleness of shape {tuple(staleness.shape)}: expected (B,), {(rows.count,)}")
    compared = None
    if alongside is not None:
        if alongside.old_log_prob is not old_log_prob or alongside.rollout_log_prob is not rollout_log_prob:
            raise ValueError(
                "alongside is the stage of other tensors: pass the stage of these tensors, or omit alongside."
            )
        compared = rows.tokens(alongside.valid), rows.tokens(alongside.log_ratio)
    if constants is None:
        constants = batch_constants(
            spec,
            old_log_prob=old_log_prob,
            rollout_log_prob=rollout_log_prob,
            response_mask=response_mask,
            segment_ids=segment_ids,
            versions=versions,
            staleness=staleness,
        )

    old, mu, mask, segments, of_version, age = rows.unpack(*given.values(), segment_ids, versions, by_token)
    mask = mask.bool()
    ids = choose_ids(spec, segment_ids=segments, versions=of_version)
    ages = spread_ages(spec, rows, mask, by_row=staleness if by_token is None else None, by_token=age)
    found = decide_rollout(
        spec, rows, old=old, mu=mu, mask=mask, ids=ids, ages=ages, constants=constants, compared=compared
    )
    sample, mismatch = None, None
    statistics: dict[str, Statistic] = {}
    if measure != "nothing":
        sample = None if alongside is None else alongside.sample
        if sample is None:
            sample = build_sample(rows, mask, found.valid, segments, staleness)
        if measure == "all":
            statistics, mismatch = telemetry.measure_rollout(sample, found.log_ratio, old, mu)
        if not any(each.needs_step for each in spec.all_weights.values()):
            statistics |= telemetry.measure_weight(sample, found.weighed, mismatch.ratio if mismatch else None)
    applied = found.decided.to(promote_weight_dtype(old, mu)) if found.weighed is None else found.weighed.weight
    weight, keep, log_ratio, valid, decided, mask, *drops = rows.pack(
        applied, found.keep, found.log_ratio, found.valid, found.decided, mask, *found.drops.values()
    )
    return RolloutStage(
        spec=spec,
        weight=weight,
        keep=keep,
        rejected=dict(zip(found.drops, drops, strict=True)),
        log_ratio=log_ratio,
        valid=valid,
        decided=decided,
        response_mask=mask,
        old_log_prob=old_log_prob,
        rollout_log_prob=rollout_log_prob,
        rows=rows,
        units=found.units,
        statistics=statistics,
        sample=sample,
        mismatch=mismatch,
        segment_ids=segment_ids,
    )


def step_stage(
    spec: CorrectionSpec, stage: RolloutStage, *, log_prob: Tensor, advantages: Tensor | None = None
) -> StepStage:
    """Compute the weights and the kept tokens of one gradient step.

    Args:
        stage: result of ``rollout_stage`` for the same rows.
        log_prob: (B, T) log pi, detached here. Non-finite values are counted in ``nonfinite/log_prob``; non-finite
            advantages are counted too. The caller stops in either case, because no mask can remove such values from the
            gradient.
        advantages: (B, T); only signs are used, see ``MaskSpec.sign``. None if no mask reads them; statistics by sign
            are then empty.

    Raises:
        ValueError: shapes differ, the stage belongs to another correction, or a mask's advantages are missing.

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
            f"the rollout stage was computed for {stage.spec.to_mapping()}, but the step stage was called for "
            f"{spec.to_mapping()}: run rollout_stage again with the new correction."
        )
    rows = stage.rows
    given = {"log_prob": log_prob} if advantages is None else {"log_prob": log_prob, "advantages": advantages}
    detect_layout(response_mask=stage.response_mask, **given)
    policies = log_prob, stage.old_log_prob, stage.rollout_log_prob
    decisions = stage.valid, stage.decided, stage.log_ratio, stage.weight, stage.keep, *stage.rejected.values()
    pi, old, mu, signs, segments, finite, valid, log_rho, weight, keep, *rejected = rows.unpack(
        *policies, advantages, stage.segment_ids, *decisions
    )
    if signs is None:
        _check_advantages_unread(spec)
        signs = torch.zeros_like(log_rho)
    all_of_it = stage.mismatch is not None
    log_r = compute_log_ratio(pi, old, valid) if all_of_it or spec.step_parts else None
    operands: dict[Ratio, tuple[Tensor, Tensor, Tensor]] = {"rollout": (log_rho, old, mu)}
    if log_r is not None:
        operands |= {"full": (log_rho + log_r, pi, mu), "ppo": (log_r, pi, old)}

    drops: dict[str, Tensor] = {}
    weighed: list[telemetry.AppliedWeight] = []
    for key, part in spec.all_weights.items():
        if not part.needs_step:
            continue
        applied = apply_weight(part, operands[part.ratio][0], stage.units[part.level], valid, 1.0, weight.dtype)
        if part.when != "any":
            applied = applied.restrict(find_applicable(part, signs, valid, rows, turns=segments))
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
                drop = drop & find_applicable(mask, signs, valid, rows, log_ratio=log_value, turns=segments)
            drops[f"masks.{name}"] = drop
            keep = keep & ~drops[f"masks.{name}"]

    statistics, full = dict(stage.statistics), None
    if stage.sample is not None:
        if stage.mismatch is not None:
            ppo_drift, full_drift = (
                drift if spec.reads_mu else torch.where(finite, drift, 0.0)
                for drift in (operands["ppo"][0], operands["full"][0])
            )
            measured, full = telemetry.measure_step(stage.sample, stage.mismatch, ppo_drift, full_drift, pi, signs)
            statistics |= measured
            if spec.penalty is not None:
                statistics |= telemetry.measure_penalty(operands[spec.penalty.ratio][0], valid)
        if weighed and weighed[0].at is None:
            statistics |= telemetry.measure_weight(stage.sample, weighed[0], full)
        elif weighed:
            statistics |= telemetry.measure_weights_by_sign(stage.sample, weighed, raw=full is not None)
        before = dict(zip(stage.rejected, rejected, strict=True))
        of_tokens = [f"masks.{name}" for name, mask in spec.masks if mask.level == "token"]
        statistics |= telemetry.measure_keep(stage.sample, keep, before | drops, signs, valid, of_tokens)
    weight, keep, *of_step = rows.pack(weight, keep, *drops.values())
    return StepStage(weight, keep, stage.rejected | dict(zip(drops, of_step, strict=True)), statistics)


def _check_advantages_unread(spec: CorrectionSpec) -> None:
    parts: dict[str, WeightSpec | MaskSpec] = {f"masks.{name}": mask for name, mask in spec.masks}
    for key, part in (parts | spec.all_weights).items():
        if part.when not in ("any", "post_tool"):
            raise ValueError(
                f"correction.{key}.when={part.when} without advantages: its rows are unknown. "
                f"Pass advantages, (B, T), or set correction.{key}.when=any."
            )
