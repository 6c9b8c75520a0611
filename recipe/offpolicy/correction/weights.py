"""Importance weights on a ratio of policies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ratios import beyond, exp_clamped
from .units import Units
from .weight_spec import WeightSpec


def log_weight(spec: WeightSpec, log_ratio: Tensor, units: Units) -> Tensor:
    """Log of the importance weight of each unit before its bounds.

    ``product`` sum_t log r_t, exact importance sampling of the unit's tokens; ``geometric`` (1/T) sum_t log r_t.

    Args:
        log_ratio: (B, T), or (N,) packed, float64, log r_t in nats, 0 where not valid.
        units: of ``spec.level``.

    Returns:
        One float64 a unit, in nats; 0 for a unit without a token.
    """
    return units.mean(log_ratio) if spec.aggregate == "geometric" else units.total(log_ratio)


def bounded(spec: WeightSpec, raw: Tensor) -> Tensor:
    """The weight within its bounds: clip(raw, lower, upper); ``reject`` leaves it, see ``rejected``.

    Yao et al. 2025 truncate by token, Liu et al. 2025 by sequence; SkyRL ships the caps 2.0 and 5.0.
    """
    if spec.kind == "reject" or (spec.lower is None and spec.upper is None):
        return raw
    return raw.clamp(min=spec.lower, max=spec.upper)


def rejected(spec: WeightSpec, log_value: Tensor) -> Tensor:
    """Units that ``reject`` drops: outside [lower, upper], inclusive, compared in float32 in log space.

    Masked importance sampling of Liu et al. 2025: rho 1[lower <= rho <= upper].

    Args:
        log_value: from ``log_weight``.

    Returns:
        One bool a unit.
    """
    if spec.kind != "reject":
        return torch.zeros_like(log_value, dtype=torch.bool)
    lower = -math.inf if spec.lower is None else math.log(spec.lower)
    return beyond(log_value, lower, math.inf if spec.upper is None else math.log(spec.upper))


def mean_weight(spec: WeightSpec, log_ratio: Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """Sum of the weights of all units that have a token, what is rejected as 0, and the number of these units.

    Their quotient is what ``normalize`` divides by.

    Returns:
        Two 0-dim float64 tensors.
    """
    log_value = log_weight(spec, log_ratio, units)
    weight = bounded(spec, exp_clamped(log_value))
    exists = units.tokens > 0
    counted = torch.where(exists & ~rejected(spec, log_value), weight, 0.0)
    return counted.sum(), exists.sum(dtype=torch.float64)
