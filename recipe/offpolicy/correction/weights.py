"""Importance weights on a ratio of policies: specification and formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from .problem import SpecError
from .ratios import EXP_CLAMP, clamp_and_exp, exceeds_bounds
from .units import Level, Sign, Units, When, check_sign_is_read, check_tool_is_seen
from .validation import (
    compute_derived,
    read_bool,
    read_choice,
    read_factors,
    read_number,
    read_power,
    read_ratio_bounds,
    require_keys,
    usual_bound,
)

WeightRatio = Literal["rollout", "full"]
WeightAggregate = Literal["product", "geometric", "minimum"]
Kind = Literal["truncate", "clip", "reject", "gamma"]

_GAMMA = ("power", "rate")
_OPTIONAL = ("aggregate", "ratio", "normalize", "by_staleness", "by_position", "when", "sign")


@dataclass(frozen=True)
class WeightSpec:
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
        by_staleness: factor of |log bound| by age, see ``MaskSpec.by_staleness``.
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

    def __post_init__(self) -> None:
        compute_derived(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str = "correction.weight") -> WeightSpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show.

        Raises:
            SpecError: a value is malformed.
        """
        if mapping.get("kind") == "gamma":
            require_keys(mapping, {"level", "kind", *_GAMMA}, key, (*_OPTIONAL, "lower", "upper"))
            mapping = {"lower": None, "upper": None, **mapping}
        else:
            require_keys(mapping, {"level", "kind", "lower", "upper"}, key, _OPTIONAL)
        kind = read_choice(mapping, "kind", Kind, key)
        lower, upper = read_ratio_bounds(mapping, key)
        for side, bound in (("lower", lower), ("upper", upper)):
            if bound is not None and abs(math.log(bound)) > EXP_CLAMP:
                raise SpecError(
                    f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, so a weight never leaves "
                    f"[{math.exp(-EXP_CLAMP):.3g}, {math.exp(EXP_CLAMP):.3g}].",
                    "Set a bound inside, or null to leave that side open.",
                    key=f"{key}.{side}",
                    value=bound,
                    proposed=usual_bound(mapping, side, key),
                )
        if kind == "truncate" and lower is not None and upper is not None:
            raise SpecError(
                "kind 'truncate' bounds only one side.",
                f"Set {key}.kind=clip to bind both, or one of the bounds to null.",
                key=f"{key}.lower",
                value=lower,
                alongside={f"{key}.upper": upper},
                proposed={f"{key}.kind": "clip"},
            )
        if kind == "clip" and (lower is None or upper is None):
            raise SpecError(
                "'clip' bounds both sides.",
                f"Give both bounds, or set {key}.kind=truncate.",
                key=f"{key}.kind",
                value="clip",
                alongside={f"{key}.lower": lower, f"{key}.upper": upper},
                proposed=(
                    {f"{key}.lower": 0.5, f"{key}.upper": 2.0}
                    if lower is None and upper is None
                    else {f"{key}.kind": "truncate"}
                ),
            )
        if kind == "gamma" and (lower is not None or upper is not None):
            side = "lower" if upper is None else "upper"
            raise SpecError(
                "'gamma' has no bounds.",
                key=f"{key}.{side}",
                value=mapping[side],
                alongside={f"{key}.kind": "gamma"},
                proposed={f"{key}.lower": None, f"{key}.upper": None},
            )
        if kind == "reject" and lower is None and upper is None:
            raise SpecError(
                "nothing would be rejected.",
                f"Give a bound, or set {key}.kind=truncate.",
                key=f"{key}.kind",
                value="reject",
                alongside={f"{key}.lower": None, f"{key}.upper": None},
                proposed={f"{key}.upper": 2.0},
            )
        weight = cls(
            level=read_choice(mapping, "level", Level, key),
            kind=kind,
            lower=lower,
            upper=upper,
            aggregate=read_choice(mapping, "aggregate", WeightAggregate, key, "product"),
            ratio=read_choice(mapping, "ratio", WeightRatio, key, "rollout"),
            normalize=read_bool(mapping, "normalize", key),
            by_staleness=read_factors(mapping, key),
            when=read_choice(mapping, "when", When, key, "any"),
            sign=read_choice(mapping, "sign", Sign, key, "row"),
            by_position=read_power(mapping, key),
            **{name: _read_positive(mapping, name, key) for name in (_GAMMA if kind == "gamma" else ())},
        )
        weight._check_factors(key)
        weight._check_prefix(key)
        check_sign_is_read(weight.when, weight.sign, key, {f"{key}.sign": "row"})
        check_tool_is_seen(weight.when, weight.level, weight.by_staleness is not None, key)
        if weight.normalize and weight.needs_step:
            of_policy = weight.ratio != "rollout"
            raise SpecError(
                "the weight is decided at each gradient step, so the batch's mean would depend on the split into "
                "micro-batches.",
                key=f"{key}.normalize",
                value=True,
                alongside={f"{key}.ratio": "full"} if of_policy else {f"{key}.when": weight.when},
                proposed={f"{key}.normalize": False},
            )
        return weight

    def _check_factors(self, key: str) -> None:
        if self.by_staleness is None:
            return
        logs = [abs(math.log(bound)) for bound in (self.lower, self.upper) if bound is not None]
        reason = ""
        if not logs:
            reason = "there is no bound to multiply."
        elif max(logs) * max(self.by_staleness) > EXP_CLAMP:
            reason = (
                f"|log bound| {max(logs):g} times {max(self.by_staleness):g} is beyond the +-{EXP_CLAMP:g} nats at "
                f"which log-ratios are clamped, so there is no bound at that age."
            )
        if reason:
            raise SpecError(
                reason,
                f"Set {key}.by_staleness=null, or a bound and factors below that.",
                key=f"{key}.by_staleness",
                value=list(self.by_staleness),
            )

    def _check_prefix(self, key: str) -> None:
        if self.aggregate == "minimum" and self.level != "prefix":
            raise SpecError(
                "minimum uses the least ratio in a token's prefix, so it needs level prefix.",
                key=f"{key}.aggregate",
                value="minimum",
                alongside={f"{key}.level": self.level},
                proposed={f"{key}.level": "prefix"},
            )
        if self.by_position is not None and self.lower is None and self.upper is None:
            raise SpecError(
                "there is no bound to scale.",
                key=f"{key}.by_position",
                value=self.by_position,
                proposed={f"{key}.by_position": None},
            )

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        mapping = asdict(self)
        factors, power, when, sign = (mapping.pop(name) for name in ("by_staleness", "by_position", "when", "sign"))
        for name in ("lower", "upper") if self.kind == "gamma" else _GAMMA:
            del mapping[name]
        # Unset keys are left out, so that the fingerprints of corrections that do not use them stay the same.
        mapping |= {} if factors is None else {"by_staleness": list(factors)}
        mapping |= {} if power is None else {"by_position": power}
        return mapping if when == "any" else mapping | {"when": when, "sign": sign}

    @cached_property
    def needs_step(self) -> bool:
        """True if the weight needs the current policy or the advantages."""
        return self.ratio != "rollout" or self.when != "any"

    @cached_property
    def picks_tokens(self) -> bool:
        """True if the weight can apply to only some tokens of a unit."""
        return self.when == "post_tool" or (self.when != "any" and self.sign == "token")


def _read_positive(mapping: Mapping[str, Any], name: str, key: str) -> float:
    value = read_number(mapping[name], f"{key}.{name}", nullable=False)
    if value is None or value <= 0:
        raise SpecError("a number > 0.", key=f"{key}.{name}", value=mapping[name], proposed={f"{key}.{name}": 2.0})
    return value


Bound = Tensor | float | None
"""A bound of a weight: one number for all units, or one per unit; None if the side is open."""


def compute_log_weight(spec: WeightSpec, log_ratio: Tensor, units: Units) -> Tensor:
    """Compute the log of each unit's importance weight before its bounds.

    ``product`` sum_t log r_t, exact importance sampling of the unit's tokens; ``geometric`` (1/T) sum_t log r_t;
    ``minimum``, by prefix, log r_t + min(0, min_{s<t} log r_s) (MinPRO, Lei et al. 2026).

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
