"""Importance weights on a ratio of policies: specification, formula and bounds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .ratios import clamp_and_exp, exceeds_bounds
from .units import Level, Part, Sign, Units, When

WeightRatio = Literal["rollout", "full"]
WeightAggregate = Literal["product", "geometric", "minimum"]
Kind = Literal["truncate", "clip", "reject", "gamma"]
GAMMA = ("power", "rate")
"""Keys of kind ``gamma``."""


@dataclass(frozen=True)
class WeightSpec(Part):
    """A detached importance weight on a ratio of policies.

    Attributes:
        level: the tokens that share one weight. ``token``: each token has its own weight; ``sequence``: all tokens of a
            row; ``turn``: each run of response tokens between tool outputs; ``version``: the tokens of a row that were
            sampled by the same version of the weights.
        kind: ``truncate`` bounds one side, ``clip`` bounds both sides; ``reject`` drops units outside the bounds and
            keeps the weight of all other units (masked importance sampling). ``gamma`` has no bounds: exp(rate (1 - w))
            w^power, which is 1 at w = 1 and greatest at w = power / rate (VESPO, Shen et al. 2026).
        lower, upper: inclusive bounds, > 0, or None for an open side.
        aggregate: ``product`` prod_t rho_t, ``geometric`` its T-th root, over the tokens that share the weight;
            ``minimum``, at level prefix, rho_t times the least ratio before it, capped at 1 (MinPRO, Lei et al. 2026).
        ratio: ``rollout`` pi_old / mu; ``full`` pi / mu, for base losses without a ratio of their own.
        normalize: divide by the mean over the whole batch: over tokens at token level, otherwise over rows, turns or
            versions. Rejected weights count as 0.
        by_staleness: factors that multiply |log bound|, one per age, see ``MaskSpec.by_staleness``.
        power, rate: k and lambda of kind ``gamma``, > 0; None for the other kinds.
        by_position: |log bound| is multiplied by t to this power at the t-th valid token of a row; only at level
            prefix.
        when, sign: the tokens to which the weight applies, see ``MaskSpec.when``; all other tokens have weight 1.
    """

    level: Level
    kind: Kind
    lower: float | None
    upper: float | None
    aggregate: WeightAggregate = "product"
    ratio: WeightRatio = "rollout"
    normalize: bool = False
    by_staleness: tuple[float, ...] | None = None
    when: When = "any"
    sign: Sign = "row"
    by_position: float | None = None
    power: float | None = None
    rate: float | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        mapping = asdict(self)
        factors, power, when, sign = (mapping.pop(name) for name in ("by_staleness", "by_position", "when", "sign"))
        for name in ("lower", "upper") if self.kind == "gamma" else GAMMA:
            del mapping[name]
        # Unset keys are left out, so that the fingerprints of corrections that do not use them stay the same.
        mapping |= {} if factors is None else {"by_staleness": list(factors)}
        mapping |= {} if power is None else {"by_position": power}
        return mapping if when == "any" else mapping | {"when": when, "sign": sign}


Bound = Tensor | float | None
"""A bound of a weight: one number for all units, or one per unit; None if the side is open."""


def compute_log_weight(spec: WeightSpec, log_ratio: Tensor, units: Units) -> Tensor:
    """Compute the log of each unit's importance weight before its bounds.

    ``product``: sum_t log r_t, the exact importance weight of the unit's tokens; ``geometric``: (1/T) sum_t log r_t;
    ``minimum``, for each prefix: log r_t + min(0, min_{s<t} log r_s) (MinPRO, Lei et al. 2026).

    Args:
        log_ratio: (B, T), or (N,) packed, float64, log r_t in nats, 0 for tokens that are not valid.
        units: of ``spec.level``.

    Returns:
        One float64 per unit, in nats; 0 for a unit without a token.

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
    """Choose float64 bounds for each unit's weight by age or length; return the bounds of ``spec`` if neither is used.

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
        return (math.log(bound) * units.scale_by_position(spec.by_position)).exp()
    if bound is None or spec.by_staleness is None:
        return bound
    # A factor of 1 leaves the bound bitwise unchanged.
    by_age = [bound if factor == 1 else math.exp(math.log(bound) * factor) for factor in spec.by_staleness]
    return units.choose_by_age(by_age, torch.float64)


def apply_bounds(spec: WeightSpec, raw: Tensor, bounds: tuple[Bound, Bound] | None = None) -> Tensor:
    """Bound the weight: clip(raw, lower, upper); ``reject`` leaves it unchanged, see ``find_rejected_units``.

    ``gamma`` has no bounds: exp(rate (1 - raw)) raw^power.

    Args:
        bounds: from ``choose_bounds``, in the shape and dtype of ``raw``; None: the bounds of ``spec``.

    Yao et al. 2025 truncate the weights of tokens, and Liu et al. 2025 those of sequences. SkyRL uses the caps 2.0 and
    5.0.

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
    """Find the units that ``reject`` drops: those outside [lower, upper], inclusive, compared in float32 in log space.

    This is masked importance sampling, rho 1[lower <= rho <= upper] (Liu et al. 2025).

    Args:
        log_value: from ``compute_log_weight``.
        units: of ``spec.level``.

    Returns:
        One bool per unit.

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


@dataclass(frozen=True)
class AppliedWeight:
    """A weight before and after its bounds are applied, with the tokens that it rejects.

    Attributes:
        spec: specification of the weight.
        by_unit: float64, log of the raw weight of each of ``units``.
        raw, weight: per token, before and after bounds and normalisation, 0 for tokens that are not valid.
        drop: bool per token, tokens that a weight of kind ``reject`` drops, meaningful only for valid tokens; None for
            other kinds.
        bounds: lower and upper bound of the raw weight, one number for all tokens or one per token; None for an open
            side.
        at: bool per token, valid tokens to which the weight applies; None: all valid tokens.
    """

    spec: WeightSpec
    units: Units
    by_unit: Tensor
    raw: Tensor
    weight: Tensor
    drop: Tensor | None
    bounds: tuple[Bound, Bound]
    at: Tensor | None = None

    def restrict(self, at: Tensor) -> AppliedWeight:
        """Restrict the weight to the valid tokens that ``at`` flags; the values for other tokens become meaningless."""
        at = self.units.valid & at
        return replace(self, at=at, drop=None if self.drop is None else self.drop & at)


def apply_weight(
    spec: WeightSpec, log_value: Tensor, units: Units, valid: Tensor, mean: float, dtype: torch.dtype
) -> AppliedWeight:
    """Compute the raw weight, the bounded weight divided by ``mean``, and the tokens that the weight rejects.

    Example:
        >>> from .units import partition_units
        >>> spec, valid = WeightSpec("token", "truncate", None, 2.0), torch.ones(1, 2, dtype=torch.bool)
        >>> log_r, units = torch.tensor([[0.0, 5.0]]).double(), partition_units("token", valid, None)
        >>> apply_weight(spec, log_r, units, valid, 1.0, torch.float32).weight.tolist()
        [[1.0, 2.0]]
    """
    by_unit = compute_log_weight(spec, log_value, units)
    raw = torch.where(valid, units.spread(clamp_and_exp(by_unit)).to(dtype), 0.0)
    lower, upper = (
        units.spread(bound).to(dtype) if isinstance(bound, Tensor) else bound for bound in choose_bounds(spec, units)
    )
    bounds = lower, upper
    weight = apply_bounds(spec, raw, bounds)
    if spec.lower is not None and spec.kind != "reject":
        # The lower bound may have raised the weights of invalid tokens above 0.
        weight = torch.where(valid, weight, 0.0)
    drop = units.spread(find_rejected_units(spec, by_unit, units)) if spec.kind == "reject" else None
    weight = weight if mean == 1.0 else weight / mean
    return AppliedWeight(spec=spec, units=units, by_unit=by_unit, raw=raw, weight=weight, drop=drop, bounds=bounds)


def sum_weights(spec: WeightSpec, log_ratio: Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """Sum the weights of all units that have a token, with rejected units as 0; also return the number of these units.

    ``normalize`` divides weights by their mean, which is this sum divided by this count.

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
