"""Results of the two stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .rows import RowLayout
from .sample import TokenSample
from .spec import CorrectionSpec
from .statistics import Statistic
from .telemetry import Mismatch
from .units import Level, Units


@dataclass(frozen=True)
class BatchConstants:
    """Batch-level constants, so that the loss does not depend on how the batch is split over micro-batches and ranks.

    Attributes:
        weight_mean: with ``normalize``, what weights are divided by; None otherwise.
        cutoffs: mask name -> the greatest (log r)^2 that ``second_moment`` keeps.
    """

    weight_mean: float | None = None
    cutoffs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutStage:
    """Decisions from mu and pi_old, in the layout of the given tensors: (B, T), or nested by row.

    Attributes:
        spec: the correction that decided; the step stage must be of the same.
        weight: (B, T) float32 or wider, detached, 0 off ``valid``; 1 where the weight waits for the current policy.
        keep: (B, T) bool, False off ``valid`` and where a weight or mask that needs neither pi nor advantages rejects.
        rejected: what rejected it -> (B, T) bool, for the parts decided here, under the keys of the correction.
        log_ratio: (B, T) log(pi_old / mu), 0 off ``valid``.
        valid: (B, T) bool, the response mask less tokens whose mu or pi_old is not finite.
        response_mask: (B, T) bool, as given.
        old_log_prob, rollout_log_prob: (B, T), as given.
        rows: how the tokens of all these lie.
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
    rows: RowLayout
    units: dict[Level, Units]
    statistics: dict[str, Statistic]
    sample: TokenSample | None = None
    mismatch: Mismatch | None = None


@dataclass(frozen=True)
class StepStage:
    """Weight and keep of one gradient step, in the layout of the given tensors: (B, T), or nested by row.

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
