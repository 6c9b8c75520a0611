"""Importance weights on a ratio of policies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ratios import clamp_and_exp, exceeds_bounds
from .units import Units
from .weight_spec import WeightSpec

Bound = Tensor | float | None
"""A bound of a weight, for all or for each; None where it is open."""


def compute_log_weight(spec: WeightSpec, log_ratio: Tensor, units: Units) -> Tensor:
    """Compute the log of each unit's importance weight before its bounds.

    ``product`` sum_t log r_t, exact importance sampling of the unit's tokens; ``geometric`` (1/T) sum_t log r_t;
    ``minimum``, by prefix, log r_t + min(0, min_{s<t} log r_s) (MinPRO, Lei et al. 2026).

    Args:
        log_ratio: (B, T), or (N,) packed, float64, log r_t in nats, 0 where not valid.
        units: of ``spec.level``.

    Returns:
        One float64 a unit, in nats; 0 for a unit without a token.

    Example:
        >>> from .units import partition_units
        >>> log_r, valid = torch.tensor([[1.0, 3.0]]).double(), torch.tensor([[True, True]])
        >>> product = WeightSpec("sequence", "truncate", None, 2.0)
        >>> compute_log_weight(product, log_r, partition_units("sequence", valid, None)).tolist()
        [[4.0]]
    """
    if spec.aggregate == "minimum":
        return log_ratio.double() + units.least_before(log_ratio)
    return units.mean(log_ratio) if spec.aggregate == "geometric" else units.total(log_ratio)


def choose_bounds(spec: WeightSpec, units: Units) -> tuple[Bound, Bound]:
    """Choose the bounds of each unit's weight by its age or length, float64; those of ``spec`` where neither is read.

    Example:
        >>> from .units import partition_units
        >>> spec = WeightSpec("token", "truncate", None, 2.0, by_staleness=(1.0, 2.0))
        >>> ages = torch.tensor([[0.0, 1.0, 7.0]])
        >>> lower, upper = choose_bounds(spec, partition_units("token", ages >= 0, None, ages=ages))
        >>> lower, [round(each, 9) for each in upper[0].tolist()]
        (None, [2.0, 4.0, 4.0])
    """
    lower, upper = (_scale(bound, spec, units) for bound in (spec.lower, spec.upper))
    return lower, upper


def _scale(bound: float | None, spec: WeightSpec, units: Units) -> Bound:
    if bound is not None and spec.by_position is not None:
        return (math.log(bound) * units.tokens.pow(spec.by_position)).exp()
    if bound is None or spec.by_staleness is None:
        return bound
    # A factor of 1 leaves the bound as it is, to the bit.
    by_age = [bound if factor == 1 else math.exp(math.log(bound) * factor) for factor in spec.by_staleness]
    return units.choose_by_age(by_age, torch.float64)


def apply_bounds(spec: WeightSpec, raw: Tensor, bounds: tuple[Bound, Bound] | None = None) -> Tensor:
    """Bound the weight: clip(raw, lower, upper); ``reject`` leaves it unchanged, see ``find_rejected_units``.

    ``gamma`` has no bounds: exp(rate (1 - raw)) raw^power.

    Args:
        bounds: from ``choose_bounds``, in the shape and dtype of ``raw``; None: those of ``spec``.

    Yao et al. 2025 truncate by token, Liu et al. 2025 by sequence; SkyRL ships the caps 2.0 and 5.0.

    Example:
        >>> apply_bounds(WeightSpec("token", "clip", 0.5, 2.0), torch.tensor([0.1, 1.0, 3.0])).tolist()
        [0.5, 1.0, 2.0]
    """
    if spec.power is not None and spec.rate is not None:
        return (spec.rate * (1 - raw) + spec.power * raw.log()).exp()
    lower, upper = (spec.lower, spec.upper) if bounds is None else bounds
    if spec.kind == "reject" or (lower is None and upper is None):
        return raw
    return raw.clamp(min=lower, max=upper)  # type: ignore[arg-type]


def find_rejected_units(spec: WeightSpec, log_value: Tensor, units: Units) -> Tensor:
    """Find the units that ``reject`` drops: outside [lower, upper], inclusive, compared in float32 in log space.

    Masked importance sampling of Liu et al. 2025: rho 1[lower <= rho <= upper].

    Args:
        log_value: from ``compute_log_weight``.
        units: of ``spec.level``.

    Returns:
        One bool a unit.

    Example:
        >>> from .units import partition_units
        >>> log_weight = torch.tensor([[0.1, 1.0, 3.0]]).log()
        >>> units = partition_units("token", torch.ones(1, 3, dtype=torch.bool), None)
        >>> find_rejected_units(WeightSpec("token", "reject", 0.5, 2.0), log_weight, units).tolist()
        [[True, False, True]]
    """
    if spec.kind != "reject":
        return torch.zeros_like(log_value, dtype=torch.bool)
    lower = -math.inf if spec.lower is None else math.log(spec.lower)
    limits = lower, math.inf if spec.upper is None else math.log(spec.upper)
    scaled = (units.scale_limit(limit, spec.by_staleness, spec.by_position) for limit in limits)
    return exceeds_bounds(log_value, *scaled)


def sum_weights(spec: WeightSpec, log_ratio: Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """Sum the weights of all units that have a token, with 0 for rejected ones, and count these units.

    Their quotient is what ``normalize`` divides by.

    Returns:
        Two 0-dim float64 tensors.

    Example:
        >>> from .units import partition_units
        >>> log_r, valid = torch.tensor([[0.0, 5.0, 9.0]]).double(), torch.tensor([[True, True, False]])
        >>> spec = WeightSpec("token", "truncate", None, 2.0)
        >>> total, count = sum_weights(spec, log_r, partition_units("token", valid, None))
        >>> total.item(), count.item()
        (3.0, 2.0)
    """
    log_value = compute_log_weight(spec, log_ratio, units)
    weight = apply_bounds(spec, clamp_and_exp(log_value), choose_bounds(spec, units))
    exists = units.exists
    counted = torch.where(exists & ~find_rejected_units(spec, log_value, units), weight, 0.0)
    return counted.sum(), exists.sum(dtype=torch.float64)
