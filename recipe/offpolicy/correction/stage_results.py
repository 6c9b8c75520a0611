"""Results of the two stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .row_layout import RowLayout
from .spec import CorrectionSpec
from .statistics import Statistic
from .telemetry import Mismatch
from .token_sample import TokenSample
from .units import Level, Units


@dataclass(frozen=True)
class BatchConstants:
    """Batch-level constants, so that the loss does not depend on how the batch is split over micro-batches and ranks.

    Attributes:
        weight_mean: with ``normalize``, the mean by which weights are divided; None otherwise.
        cutoffs: mask name -> the greatest (log r)^2 that ``second_moment`` keeps.
    """

    weight_mean: float | None = None
    cutoffs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutStage:
    """Decisions from mu and pi_old, in the layout of the given tensors: (B, T), or nested by row.

    Attributes:
        spec: the correction; the step stage must be given the same.
        weight: (B, T) float32 or wider, detached, 0 off ``decided``; 1 where the weight waits for the current policy.
        keep: (B, T) bool, False off ``decided`` and where a part rejects that needs neither pi nor advantages.
        rejected: key of the part below ``correction`` -> (B, T) bool, tokens that it rejects; of this stage's parts.
        log_ratio: (B, T) log(pi_old / mu), 0 off ``valid``.
        valid: (B, T) bool, the response mask less tokens whose mu or pi_old is not finite.
        decided: (B, T) bool, the tokens that are decided on: ``valid``, and for a correction that does not read mu
            also those whose mu alone is not finite.
        response_mask: (B, T) bool, as given.
        old_log_prob, rollout_log_prob: (B, T), as given.
        rows: layout of all these tensors.
        units: level -> the units that the correction decides by.
        statistics: name -> typed statistic, see ``catalogue``.
        sample, mismatch: inputs of the step stage's statistics; None where nothing is measured.
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
    """Weight and keep of one gradient step, in the layout of the given tensors: (B, T), or nested by row.

    Attributes:
        weight: (B, T) float32 or wider, detached; never multiplied by ``keep``; 0 off the response mask.
        keep: (B, T) bool; False off the response mask.
        rejected: key of the part -> (B, T) bool, the tokens that it rejects; without meaning off the stage's ``valid``.
        statistics: name -> typed statistic, those of the rollout stage included.
    """

    weight: Tensor
    keep: Tensor
    rejected: dict[str, Tensor]
    statistics: dict[str, Statistic]
