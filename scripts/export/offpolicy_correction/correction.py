"""Corrections of the mismatch between rollout engine and trainer: a weight and a keep mask per token.

mu, pi_old and pi are the policies of the rollout engine, of the trainer at the start of the step, and of the current
weights. The policy term of the loss is multiplied by weight * keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from .ratios import (
    clamp_and_exp,
    compute_divergence,
    compute_finite_log_ratio,
    compute_log_ratio,
    exceeds_bounds,
    promote_weight_dtype,
)

_CHOICES = {
    "level": ("token", "sequence"),
    "kind": ("truncate", "clip", "reject"),
    "ratio": ("rollout", "full"),
    "aggregate": ("product", "geometric", "any"),
    "when": ("any", "negative", "positive"),
}


@dataclass(frozen=True)
class Weight:
    """Importance weight pi_old / mu, of a token or of a sequence.

    Attributes:
        level: ``token``, or ``sequence`` for one weight that all tokens of a sequence share.
        kind: ``truncate`` bounds one side, ``clip`` bounds both, and ``reject`` drops weights outside the bounds.
        lower, upper: inclusive bounds on the weight; None if open.
        aggregate: for a sequence, the ``product`` of its ratios, or their ``geometric`` mean.
    """

    level: str
    kind: str
    lower: float | None
    upper: float | None
    aggregate: str = "product"

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Bounds in nats, infinite where open."""
        return _take_logs(self.lower, self.upper)


@dataclass(frozen=True)
class Mask:
    """Drops the tokens or sequences whose ratio is outside the bounds.

    Attributes:
        ratio: ``rollout``: pi_old / mu; ``full``: pi / mu.
        level: ``token`` or ``sequence``.
        aggregate: for a sequence, the ``product``, the ``geometric`` mean, or ``any``, which checks each ratio on its
            own.
        lower, upper: inclusive bounds on the aggregate; None if open.
        delta: short form of lower = exp(-delta).
        when: ``any``; or ``negative`` or ``positive``, the required sign of the sequence's mean advantage.
    """

    ratio: str
    level: str
    aggregate: str
    lower: float | None = None
    upper: float | None = None
    delta: float | None = None
    when: str = "any"

    @property
    def log_bounds(self) -> tuple[float, float]:
        """Bounds in nats, infinite where open."""
        if self.delta is not None:
            return -self.delta, math.inf
        return _take_logs(self.lower, self.upper)


@dataclass(frozen=True)
class Correction:
    """A weight (None if all weights are 1), and masks by name; a token is kept if all masks keep it."""

    weight: Weight | None = None
    masks: dict[str, Mask] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any) -> Correction:
        """Read the section ``correction``.

        Raises:
            ValueError: a key or value is unknown, a bound is missing, or a bound is not a positive number.
        """
        if unknown := set(config) - {"weight", "masks"}:
            raise ValueError(f"correction.{sorted(unknown)[0]} is unknown. Use correction.weight and correction.masks.")
        weight = None if config["weight"] is None else _read(Weight, config["weight"], "correction.weight")
        if weight is not None and weight.aggregate == "any":
            raise ValueError("correction.weight.aggregate=any does not define a weight. Use product or geometric.")
        named = (config["masks"] or {}).items()
        return cls(weight, {name: _read(Mask, mask, f"correction.masks.{name}") for name, mask in named})


def _read(cls: type, section: Any, path: str) -> Any:
    known = {each.name for each in fields(cls)}
    if unknown := set(section) - known:
        raise ValueError(f"{path}.{sorted(unknown)[0]} is unknown. Use one of {', '.join(sorted(known))}.")
    for key, choices in _CHOICES.items():
        if key in section and section[key] not in choices:
            raise ValueError(f"{path}.{key}={section[key]} is unknown. Use one of {', '.join(choices)}.")
    part = cls(**{key: section[key] for key in section})
    bounds = {key: getattr(part, key, None) for key in ("lower", "upper", "delta")}
    for key, value in bounds.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if value is not None and not number:
            raise ValueError(f"{path}.{key}={value} is not a positive number. Set it, or null for an open side.")
    if bounds["delta"] is not None and (bounds["lower"], bounds["upper"]) != (None, None):
        raise ValueError(f"{path}.delta={bounds['delta']} is set with lower or upper. Set delta or bounds, not both.")
    if all(value is None for value in bounds.values()) and not isinstance(part, Weight):
        raise ValueError(f"{path} has no bound. Set lower, upper or delta.")
    return part


def compute_factor(
    correction: Correction,
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute weight * keep of each token, and sums over tokens for metrics.

    Args:
        old_log_prob, rollout_log_prob, log_prob: (B, T) log-probs of pi_old, mu and pi, any float dtype.
        response_mask: (B, T) bool; padding is never read.
        advantages: (B, T).

    Returns:
        (B, T) detached factor, 0 outside the mask and where pi_old, or mu if a part reads it, is not finite; and 0-dim
        float64 sums: ``k3`` of pi_old / mu (Schulman 2020), ``keep``, ``weight`` and ``weight_square`` (0 if rejected).
    """
    mask = response_mask.bool()
    valid, log_rho = compute_finite_log_ratio(old_log_prob, rollout_log_prob, mask)
    log_full = log_rho + compute_log_ratio(log_prob, old_log_prob, valid)
    # If no part reads mu, tokens for which only mu is not finite are trained on as usual.
    keep = valid if correction.weight or correction.masks else mask & torch.isfinite(old_log_prob)
    dtype = promote_weight_dtype(old_log_prob, rollout_log_prob)
    weight = keep.to(dtype)
    if correction.weight is not None:
        part = correction.weight
        value = _aggregate(part.level, part.aggregate, log_rho, valid)
        weight = torch.where(valid, clamp_and_exp(value).to(dtype).expand_as(valid), 0.0)
        if part.kind == "reject":
            keep = keep & ~exceeds_bounds(value, *part.log_bounds)
        elif (part.lower, part.upper) != (None, None):
            weight = torch.where(valid, weight.clamp(min=part.lower, max=part.upper), 0.0)
    for part in correction.masks.values():
        log_ratio = log_rho if part.ratio == "rollout" else log_full
        lower, upper = part.log_bounds
        if part.aggregate == "any":
            outside = exceeds_bounds(log_ratio, lower, upper) & valid
            if part.level == "sequence":
                outside = outside.any(-1, keepdim=True)
        else:
            outside = exceeds_bounds(_aggregate(part.level, part.aggregate, log_ratio, valid), lower, upper)
        keep = keep & ~(outside & _applies(part.when, advantages, valid))
    factor = torch.where(keep, weight, 0.0)
    k3 = torch.where(valid, compute_divergence("k3", log_rho), 0.0)
    doubled = factor.double()
    columns = {"k3": k3, "keep": keep.double(), "weight": doubled, "weight_square": doubled.square()}
    return factor, {name: column.sum() for name, column in columns.items()}


def _aggregate(level: str, aggregate: str, log_ratio: Tensor, valid: Tensor) -> Tensor:
    """Aggregate log-ratios, which are 0 outside ``valid``, in float64: (B, T) per token, (B, 1) per sequence."""
    if level == "token":
        return log_ratio
    total = log_ratio.sum(-1, keepdim=True)
    return total if aggregate == "product" else total / valid.double().sum(-1, keepdim=True).clamp(min=1)


def _take_logs(lower: float | None, upper: float | None) -> tuple[float, float]:
    return -math.inf if lower is None else math.log(lower), math.inf if upper is None else math.log(upper)


def _applies(when: str, advantages: Tensor, valid: Tensor) -> Tensor:
    """Find the sequences to which a mask applies, by the sign of their mean advantage: (B, 1) bool."""
    if when == "any":
        return torch.ones_like(valid[:, :1])
    total = torch.where(valid, advantages.detach(), 0.0).double().sum(-1, keepdim=True)
    return total < 0 if when == "negative" else total > 0
