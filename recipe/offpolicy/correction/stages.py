"""The two stages of a correction, and the statistics of inactive corrections.

``rollout_stage`` makes the decisions that depend only on mu and pi_old, once per rollout. ``step_stage`` adds the
decisions that need pi or the advantages, at every gradient step. log(pi/mu) is the sum of the first stage's
log(pi_old/mu) and the second stage's log(pi/pi_old), so OPSM costs one additional sum per step. Shadow corrections,
which are inactive, go through both stages too, without changing the gradient.

Tensors are (B, T), or nested by row with layout ``torch.jagged``, all in the same layout. Nested tensors are processed
without padding, and the results are nested too. If ``constants`` are given, no call synchronises with the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from . import telemetry
from .decisions import BatchConstants, Columns, Decisions, Rollout, apply_parts, batch_constants, decide_rollout
from .masks import Ratio
from .ratios import compute_log_ratio
from .row_layout import RowLayout, detect_layout
from .spec import CorrectionSpec
from .statistics import Statistic
from .telemetry import Mismatch
from .token_sample import TokenSample, build_sample
from .validation import rename_for_metrics

_KEEP = re.compile(
    r"keep/(?P<sign>(?:positive|negative)/)?(?P<share>token|sequence)_share"
    r"|length/\w+/keep_sequence_share"
    r"|turn/\w+/keep_token_share"
)
_WEIGHT = ("weight/mean", "weight/ess", "weight/truncated_share")


@dataclass(frozen=True)
class RolloutStage:
    """Decisions from mu and pi_old. Each property has the layout of the given tensors, padded (B, T) or nested by row.

    Attributes:
        spec: the correction; the step stage must use the same correction.
        columns: the tensors as given.
        rollout: the same as tensors of tokens.
        decisions: the decisions of the parts that need neither pi nor advantages, as tensors of tokens.
        statistics: name -> typed statistic, see ``statistics``.
        sample, mismatch: inputs of the step stage's statistics; None if nothing is measured.
    """

    spec: CorrectionSpec
    columns: Columns
    rollout: Rollout
    decisions: Decisions
    statistics: dict[str, Statistic]
    sample: TokenSample | None = None
    mismatch: Mismatch | None = None

    @property
    def weight(self) -> Tensor:
        """Float32 or wider, detached, 0 outside the decided tokens; 1 if the weight needs the current policy."""
        return self.rollout.rows.to_given_layout(self.decisions.weight)

    @property
    def keep(self) -> Tensor:
        """Bool, False for tokens that a part rejects without pi or advantages, and outside the decided tokens."""
        return self.rollout.rows.to_given_layout(self.decisions.keep)

    @property
    def valid(self) -> Tensor:
        """Bool, the response mask without tokens whose mu or pi_old is not finite."""
        return self.rollout.rows.to_given_layout(self.decisions.valid)


@dataclass(frozen=True)
class StepStage:
    """Weights and kept tokens of one gradient step, in the layout of the given tensors, padded (B, T) or nested by row.

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


def rollout_stage(
    spec: CorrectionSpec,
    *,
    constants: BatchConstants | None = None,
    measure: telemetry.Measure = "all",
    alongside: RolloutStage | None = None,
    **columns: Unpack[Columns],
) -> RolloutStage:
    """Compute the weights, masks and statistics that depend only on pi_old / mu.

    A token whose pi_old is not finite is excluded from weights, masks, T and statistics, and is counted. The same
    applies to a token whose mu is not finite. However, if the correction does not read mu, such a token is excluded
    only from statistics of ratios.

    Args:
        constants: constants of the batch to which these rows belong; None: these rows are the whole batch.
        measure: ``all`` statistics, ``decisions`` for only the statistics of weights and kept tokens, or ``nothing``;
            applies to both stages.
        alongside: stage of another correction for the same columns, computed with statistics; results that do not
            depend on the correction are reused.
        columns: see ``decisions.Columns``.

    Raises:
        ValueError: shapes differ, the ids of a level are missing, or an age is unknown.

    Example:
        >>> from .weights import WeightSpec
        >>> spec = CorrectionSpec(weight=WeightSpec("token", "truncate", None, 2.0))
        >>> pi_old, mu = torch.zeros(1, 2), torch.tensor([[0.0, -5.0]])  # ratios 1 and e^5
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> rollout_stage(spec, old_log_prob=pi_old, rollout_log_prob=mu, response_mask=mask).weight.tolist()
        [[1.0, 2.0]]
    """
    if unknown := columns.keys() - Columns.__annotations__.keys():
        raise TypeError(f"unknown columns {', '.join(sorted(unknown))}. decisions.Columns lists the known columns.")
    if constants is None:
        constants = batch_constants(spec, **columns) if spec.needs_constants else BatchConstants()
    rows, tokens, by_row = _read_columns(columns)
    rollout = Rollout.of(spec, rows, tokens, by_row)
    compared = None if alongside is None else (alongside.decisions.valid, alongside.decisions.log_ratio)
    found = decide_rollout(spec, rollout, constants, compared)
    sample, mismatch = None, None
    statistics: dict[str, Statistic] = {}
    if measure != "nothing":
        sample = None if alongside is None else alongside.sample
        if sample is None:
            sample = build_sample(rows, rollout.mask, found.valid, rollout.turns, columns.get("staleness"))
        if measure == "all":
            statistics, mismatch = telemetry.measure_rollout(sample, found.log_ratio, rollout.old, rollout.mu)
        if not any(each.needs_step for each in spec.all_weights.values()):
            weighed = found.weighed[0] if found.weighed else None
            statistics |= telemetry.measure_weight(sample, weighed, mismatch.ratio if mismatch else None)
    return RolloutStage(spec, columns, rollout, found, statistics, sample, mismatch)


def _read_columns(columns: Columns) -> tuple[RowLayout, dict[str, Tensor], Tensor | None]:
    """Return the layout, the columns as tensors of tokens, and ages per row, if ages are not per token."""
    staleness = columns.get("staleness")
    given: dict[str, Tensor] = {
        "old_log_prob": columns["old_log_prob"],
        "rollout_log_prob": columns["rollout_log_prob"],
        "response_mask": columns["response_mask"],
    }
    rows = detect_layout(**given)
    for name, column in (("segment_ids", columns.get("segment_ids")), ("versions", columns.get("versions"))):
        if column is not None:
            if column.dtype == torch.bool or column.is_floating_point():
                raise ValueError(
                    f"{name} has dtype {column.dtype}: expected integers that are equal for all tokens of a unit."
                )
            given[name] = column
    by_row = None
    if staleness is not None and staleness.dim() == 2:
        given["staleness"] = staleness
    elif staleness is not None:
        if staleness.shape != (rows.count,):
            raise ValueError(f"staleness has shape {tuple(staleness.shape)}: expected (B,), here {(rows.count,)}")
        by_row = staleness
    detect_layout(**given)
    return rows, {name: rows.tokens(column) for name, column in given.items()}, by_row


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
        >>> from .masks import MaskSpec
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
    rollout, first, sample, mismatch = stage.rollout, stage.decisions, stage.sample, stage.mismatch
    rows, old, mu, valid = rollout.rows, rollout.old, rollout.mu, first.decided
    given = {"log_prob": log_prob} if advantages is None else {"log_prob": log_prob, "advantages": advantages}
    detect_layout(old_log_prob=stage.columns["old_log_prob"], **given)
    pi = rows.tokens(log_prob)
    if advantages is None:
        _check_advantages_unread(spec)
    signs = torch.zeros_like(first.log_ratio) if advantages is None else rows.tokens(advantages)
    operands: dict[Ratio, tuple[Tensor, Tensor, Tensor]] = {"rollout": (first.log_ratio, old, mu)}
    if mismatch is not None or spec.step_parts:
        log_r = compute_log_ratio(pi, old, valid)
        operands |= {"full": (first.log_ratio + log_r, pi, mu), "ppo": (log_r, pi, old)}

    found = apply_parts(
        spec.step_parts,
        operands,
        first.units,
        valid,
        first.keep,
        first.dtype,
        constants=BatchConstants(),
        advantages=signs,
        turns=rollout.turns,
    )
    weight = first.weight
    for each in found.weighed:
        weight = each.weight if each.at is None else torch.where(each.at, each.weight, weight)
    drops = first.drops | found.drops
    statistics, full = dict(stage.statistics), None
    if sample is not None:
        if mismatch is not None:
            ppo_drift, full_drift = (
                drift if spec.reads_mu else torch.where(first.valid, drift, 0.0)
                for drift in (operands["ppo"][0], operands["full"][0])
            )
            measured, full = telemetry.measure_step(sample, mismatch, ppo_drift, full_drift, pi, signs)
            statistics |= measured
            if spec.penalty is not None:
                statistics |= telemetry.measure_penalty(operands[spec.penalty.ratio][0], valid)
        if found.weighed and found.weighed[0].at is None:
            statistics |= telemetry.measure_weight(sample, found.weighed[0], full)
        elif found.weighed:
            statistics |= telemetry.measure_weights_by_sign(sample, found.weighed, raw=full is not None)
        of_tokens = [f"masks.{name}" for name, mask in spec.masks if mask.level == "token"]
        statistics |= telemetry.measure_keep(sample, found.keep, drops, signs, valid, of_tokens)
    weight, keep, *rejected = map(rows.to_given_layout, (weight, found.keep, *drops.values()))
    return StepStage(weight, keep, dict(zip(drops, rejected, strict=True)), statistics)


def _check_advantages_unread(spec: CorrectionSpec) -> None:
    for key, part in spec.parts.items():
        if part.when not in ("any", "post_tool"):
            raise ValueError(
                f"correction.{key}.when={part.when} needs advantages to find its rows. Pass advantages, (B, T), or set "
                f"correction.{key}.when=any."
            )


@torch.no_grad()
def compute_shadow_statistics(
    shadows: Mapping[str, CorrectionSpec],
    stage: RolloutStage,
    *,
    log_prob: Tensor,
    advantages: Tensor,
    constants: Mapping[str, BatchConstants] | None = None,
) -> dict[str, Statistic]:
    """Compute each shadow's keep shares and weights, under ``shadow/<name>/``, see ``correction.statistics``.

    ``validation.rename_for_metrics`` adapts the names.

    Args:
        shadows: name -> correction.
        stage: measured stage of the active correction; its columns contain what the shadows read.
        log_prob, advantages: see ``step_stage``.
        constants: name -> constants of the batch; None: these rows are the whole batch.

    Raises:
        ValueError: a stage raised an error (the message names the shadow), or ``constants`` has no entry for a
            correction that needs one.

    Example:
        >>> from .masks import MaskSpec
        >>> token_mask = CorrectionSpec(masks=(("tm", MaskSpec("rollout", "token", "product", 0.5, 2.0, "any")),))
        >>> pi, ones = torch.zeros(1, 2), torch.ones(1, 2)
        >>> mu = torch.tensor([[0.0, -1.0]])  # r = 1 and 2.7
        >>> stage = rollout_stage(CorrectionSpec(), old_log_prob=pi, rollout_log_prob=mu, response_mask=ones)
        >>> statistics = compute_shadow_statistics({"tm": token_mask}, stage, log_prob=pi, advantages=ones)
        >>> statistics["shadow/tm/keep_token_share"].value()
        0.5
    """
    statistics: dict[str, Statistic] = {}
    for name, spec in shadows.items():
        if constants is not None and spec.needs_constants and name not in constants:
            raise ValueError(f"shadow {name} needs constants of the whole batch, but constants has no key {name}.")
        own = (constants or {}).get(name)
        try:
            first = rollout_stage(spec, constants=own, measure="decisions", alongside=stage, **stage.columns)
            step = step_stage(spec, first, log_prob=log_prob, advantages=advantages)
        except ValueError as error:
            raise ValueError(f"shadow {name}: {error}") from error
        label = f"shadow/{rename_for_metrics(name)}"
        statistics |= {f"{label}/{key}": s for key, s in _reported(spec, step.statistics)}
    return statistics


def _reported(spec: CorrectionSpec, statistics: Mapping[str, Statistic]) -> Iterable[tuple[str, Statistic]]:
    """Yield the statistics that a shadow reports, by key under the shadow's name."""
    for key, statistic in statistics.items():
        if found := _KEEP.fullmatch(key):
            share = found["share"]
            if found["sign"] and share == "sequence":
                continue
            yield (f"{found['sign'] or ''}keep_{share}_share" if share else key), statistic
        elif spec.all_weights and key in _WEIGHT:
            yield key, statistic
