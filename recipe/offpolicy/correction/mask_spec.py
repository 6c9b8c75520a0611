"""Specification of a mask: bounds on an aggregate of a ratio of policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .aggregates import AGGREGATES, Aggregate
from .problem import SpecError
from .ratios import EXP_CLAMP
from .units import Level, MaskWhen, Sign, check_sign_is_read, check_tool_is_seen
from .validation import (
    compute_derived,
    get_usual_bounds,
    read_choice,
    read_factors,
    read_number,
    read_ordered_bounds,
    read_power,
    read_ratio_bounds,
    require_keys,
)

Ratio = Literal["rollout", "full", "ppo"]

_OPTIONAL = ("sign", "by_staleness", "by_position")
AGE = "staleness"
"""Aggregate name for a mask on the weights' age."""
_WITHOUT_AGE = {
    "ratio": "an age compares no policies.",
    "lower": "fresh tokens are never too young.",
    "delta": "delta bounds a mean of log ratios.",
    "budget": "budget bounds a mean of squares.",
    "by_staleness": "it multiplies the log of a bound on a ratio.",
    "by_position": "it multiplies the log of a bound on a ratio.",
}
"""Key that is meaningless for an age -> reason."""


@dataclass(frozen=True)
class MaskSpec:
    """Bounds on an aggregate of a policy ratio, or on the weights' age; units outside the bounds lose their gradient.

    Attributes:
        ratio: ``rollout`` pi_old / mu, ``full`` pi / mu, ``ppo`` pi / pi_old. A mask on age has no ratio; it is decided
            together with masks on ``rollout``, so this attribute is ``rollout``.
        level: the tokens that share one decision, see ``WeightSpec.level``.
        aggregate: the number that is computed from these tokens and compared with the bounds: a key of
            ``aggregates.AGGREGATES``.
        lower, upper: inclusive bounds on the aggregate; None leaves a side open.
        when: tokens to which the mask applies: those with negative or with positive advantage, or any; ``outward``:
            those with A log r > 0, whose update moves the two policies further apart (VACO); ``post_tool``: those after
            the first tool result in their row, whatever the advantage.
        sign: the advantage that ``when`` reads: ``row`` is the mean over the row's valid tokens, ``token`` is each
            token's own advantage.
        delta: the bound in OPSM's notation, in nats: lower = exp(-delta); None if lower and upper were given.
        budget: with ``second_moment``, the tokens with the largest (log r)^2 are dropped until the mean over the rest
            of the batch is at most this value; None otherwise.
        by_staleness: factors of |log bound| for units whose oldest token is 0, 1, ... versions old; the last factor
            also applies to older units. None: the same bound for all units.
        by_position: power of a token's position that multiplies |log bound|, see ``WeightSpec.by_position``.
    """

    ratio: Ratio
    level: Level
    aggregate: str
    lower: float | None
    upper: float | None
    when: MaskWhen
    sign: Sign = "row"
    delta: float | None = None
    budget: float | None = None
    by_staleness: tuple[float, ...] | None = None
    by_position: float | None = None

    def __post_init__(self) -> None:
        compute_derived(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, key: str) -> MaskSpec:
        """Build from plain values; ``key`` is the Hydra path that error messages show.

        Raises:
            SpecError: a value is malformed.
        """
        if mapping.get("aggregate") == AGE:
            return cls._of_age(mapping, key)
        bound_keys = {"delta"} if "delta" in mapping else {"budget"} if "budget" in mapping else {"lower", "upper"}
        _one_way_to_bound(mapping, bound_keys, key)
        require_keys(mapping, {"ratio", "level", "aggregate", "when"} | bound_keys, key, _OPTIONAL)
        aggregate = read_choice(mapping, "aggregate", tuple(AGGREGATES), key)
        if (AGGREGATES[aggregate].reduce == "batch") != ("budget" in mapping):
            raise SpecError(
                "budget bounds second_moment, and no other aggregate.",
                key=f"{key}.aggregate",
                value=aggregate,
                alongside={f"{key}.{name}": mapping[name] for name in sorted(bound_keys)},
                **_one_kind_of_bound(mapping, key),
            )
        delta = budget = lower = upper = None
        if "delta" in mapping:
            delta = _delta(mapping["delta"], aggregate, key)
            lower = math.exp(-delta)
        elif "budget" in mapping:
            budget = read_number(mapping["budget"], f"{key}.budget", nullable=False)
            if budget is None or budget <= 0:
                raise SpecError(
                    "expected a mean of (log ratio)^2, a number > 0.",
                    key=f"{key}.budget",
                    value=mapping["budget"],
                    proposed={f"{key}.budget": 0.04},
                )
        else:
            lower, upper = _bounds(mapping, aggregate, key)
        mask = cls(
            ratio=read_choice(mapping, "ratio", Ratio, key),
            level=read_choice(mapping, "level", Level, key),
            aggregate=aggregate,
            lower=lower,
            upper=upper,
            when=read_choice(mapping, "when", MaskWhen, key),
            sign=read_choice(mapping, "sign", Sign, key, "row"),
            delta=delta,
            budget=budget,
            by_staleness=read_factors(mapping, key),
            by_position=read_power(mapping, key),
        )
        mask._check(key)
        return mask

    @classmethod
    def _of_age(cls, mapping: Mapping[str, Any], key: str) -> MaskSpec:
        for name, why in _WITHOUT_AGE.items():
            if name in mapping:
                raise SpecError(
                    f"{why} Only upper bounds an age.",
                    key=f"{key}.{name}",
                    value=mapping[name],
                    alongside={f"{key}.aggregate": AGE},
                    removed={f"{key}.{name}": mapping[name]} if "upper" in mapping else None,
                )
        upper = mapping.get("upper", "???")
        whole = isinstance(upper, int | float) and not isinstance(upper, bool) and 0 <= upper < 2**53
        if not whole or upper % 1:
            raise SpecError(
                "expected the greatest age to keep, in versions of the weights: a whole number >= 0.",
                f"Set {key}.upper=4 for example.",
                key=f"{key}.upper",
                value=upper,
                proposed={f"{key}.upper": 4},
            )
        require_keys(mapping, {"level", "aggregate", "upper"}, key, {"when", "sign"})
        level = read_choice(mapping, "level", Level, key)
        when = read_choice(mapping, "when", ("any", "negative", "positive"), key, "any")
        sign = read_choice(mapping, "sign", Sign, key, "row")
        mask = cls("rollout", level, AGE, None, float(upper), when, sign)
        mask._check(key)
        return mask

    def _check(self, key: str) -> None:
        proposed = {f"{key}.when": "negative"} if self.budget is None else {f"{key}.sign": "row"}
        check_sign_is_read(self.when, self.sign, key, proposed)
        check_tool_is_seen(self.when, self.level, self.by_staleness is not None, key)
        scales: dict[str, Any] = {"by_staleness": self.by_staleness, "by_position": self.by_position}
        for name, value in scales.items():
            if value is not None and not self.entry.on_ratio:
                raise SpecError(
                    f"the bounds of {self.aggregate} are not ratios, so they have no log to multiply.",
                    f"Set {key}.{name}=null, or {key}.aggregate=geometric with bounds on a ratio.",
                    key=f"{key}.{name}",
                    value=list(value) if isinstance(value, tuple) else value,
                    alongside={f"{key}.aggregate": self.aggregate},
                )
        widest = max(abs(bound or 0.0) for bound in (self.lower, self.upper))
        if self.level == "prefix" and self.aggregate == "binary_tv_sum" and widest > 0.9:
            raise SpecError(
                "at level prefix the bound applies to the first token alone, which cannot differ by that much.",
                key=f"{key}.upper",
                value=self.upper,
                alongside={f"{key}.lower": self.lower, f"{key}.level": "prefix"},
                proposed={f"{key}.level": "sequence"},
            )
        half_set = (self.lower is None) != (self.upper is None) and self.delta is None
        if half_set and self.level == "token" and self.entry.of_log_ratios and self.when == "any":
            side = "lower" if self.lower is None else "upper"
            raise SpecError(
                "a band on single tokens needs two bounds.",
                f"Set {key}.{side}, or {key}.aggregate=any if one side is meant to stay open.",
                key=f"{key}.{side}",
                proposed={f"{key}.aggregate": "any"},
            )
        if self.entry.reduce == "batch" and (self.level, self.ratio, self.when) != ("token", "rollout", "any"):
            raise SpecError(
                "its cutoff is fixed for the whole batch from mu and pi_old, per token, whatever the advantage.",
                key=f"{key}.aggregate",
                value=self.aggregate,
                alongside={f"{key}.{name}": getattr(self, name) for name in ("ratio", "level", "when")},
                proposed={f"{key}.ratio": "rollout", f"{key}.level": "token", f"{key}.when": "any"},
            )

    def to_mapping(self) -> dict[str, Any]:
        """Return the plain values from which ``from_mapping`` builds an equal spec."""
        if self.entry.of_age:
            kept = ("level", "aggregate", "upper", "when", "sign")
            return {name: getattr(self, name) for name in kept}
        mapping: dict[str, Any] = {"ratio": self.ratio, "level": self.level, "aggregate": self.aggregate}
        if self.delta is not None:
            mapping["delta"] = self.delta
        elif self.budget is not None:
            mapping["budget"] = self.budget
        else:
            mapping |= {"lower": self.lower, "upper": self.upper}
        mapping |= {"when": self.when, "sign": self.sign}
        # An unset key is left out, so that the fingerprints of corrections that do not use it stay the same.
        mapping |= {} if self.by_staleness is None else {"by_staleness": list(self.by_staleness)}
        return mapping | ({} if self.by_position is None else {"by_position": self.by_position})

    @property
    def entry(self) -> Aggregate:
        """The aggregate's entry in ``AGGREGATES``."""
        return AGGREGATES[self.aggregate]

    @cached_property
    def limits(self) -> tuple[float, float]:
        """Inclusive bounds on the compared value: bounds on a ratio are in nats of log-ratio.

        An open side is infinite. Both sides of ``second_moment`` are open, because its cutoff depends on the batch.
        """
        if self.delta is not None:
            return -self.delta, math.inf
        scale = math.log if self.entry.on_ratio else float
        lower = -math.inf if self.lower is None else scale(self.lower)
        return lower, math.inf if self.upper is None else scale(self.upper)

    @cached_property
    def needs_step(self) -> bool:
        """True if the decision needs the current policy or the advantages."""
        return self.ratio != "rollout" or self.when != "any"

    @cached_property
    def picks_tokens(self) -> bool:
        """True if the mask can apply to only some of a unit's tokens; the mask's reported shares then count tokens."""
        return self.when in ("outward", "post_tool") or (self.when != "any" and self.sign == "token")


def _one_way_to_bound(mapping: Mapping[str, Any], chosen: set[str], key: str) -> None:
    for name in sorted({"lower", "upper", "delta", "budget"} - chosen):
        if name in mapping:
            first = sorted(chosen)[0]
            away = first if mapping[first] in (None, "???") else name
            raise SpecError(
                "delta d means lower=exp(-d) and upper=null; budget means a cutoff for the whole batch.",
                "Give delta, or budget, or the two bounds.",
                key=f"{key}.{name}",
                value=mapping[name],
                alongside={f"{key}.{first}": mapping[first]},
                removed={f"{key}.{away}": mapping[away]},
            )


def _one_kind_of_bound(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return, as arguments of SpecError, the fix that makes the aggregate and its kind of bound match."""
    if "budget" in mapping:
        return {"proposed": {f"{key}.aggregate": "second_moment"}}
    if "delta" in mapping:
        return {"proposed": {f"{key}.aggregate": "geometric"}}
    bounds = {f"{key}.{side}": mapping[side] for side in ("lower", "upper") if side in mapping}
    return {"proposed": {f"{key}.budget": 0.04}, "removed": bounds}


def _closed(mapping: Mapping[str, Any], aggregate: str, key: str) -> dict[str, Any]:
    """Propose bounds for a mask without bounds: both bounds at level token, otherwise only the upper bound."""
    lower, upper = get_usual_bounds(aggregate)
    both = mapping.get("level") == "token" and AGGREGATES[aggregate].of_log_ratios
    return ({f"{key}.lower": lower} if both else {}) | {f"{key}.upper": upper}


def _delta(value: Any, aggregate: str, key: str) -> float:
    delta = read_number(value, f"{key}.delta", nullable=False) if value != "???" else None
    if not AGGREGATES[aggregate].of_log_ratios:
        raise SpecError(
            "delta bounds a mean or a sum of log ratios.",
            f"Set {key}.aggregate=geometric, or give lower and upper.",
            key=f"{key}.delta",
            value=value,
            alongside={f"{key}.aggregate": aggregate},
            proposed={f"{key}.aggregate": "geometric"},
        )
    if delta is None or delta < 0:
        raise SpecError(
            "a row is dropped when mean log(mu/pi) > delta, so delta must be a number >= 0, in nats per token.",
            f"Set {key}.delta=0.1 for example.",
            key=f"{key}.delta",
            value=value,
            proposed={f"{key}.delta": 0.1},
        )
    if delta > EXP_CLAMP and AGGREGATES[aggregate].reduce == "mean":
        raise SpecError(
            f"a mean never drifts by more than {EXP_CLAMP:g} nats, so the mask never acts.",
            f"Set {key}.delta=0.1 for example, or remove the mask.",
            key=f"{key}.delta",
            value=delta,
            proposed={f"{key}.delta": 0.1},
        )
    return delta


def _bounds(mapping: Mapping[str, Any], aggregate: str, key: str) -> tuple[float | None, float | None]:
    entry = AGGREGATES[aggregate]
    lower, upper = read_ratio_bounds(mapping, key) if entry.on_ratio else read_ordered_bounds(mapping, key)
    if lower is None and upper is None:
        raise SpecError(
            "a mask with both sides open never acts.",
            "Set a bound, or remove the mask.",
            key=f"{key}.lower",
            alongside={f"{key}.upper": None},
            proposed=_closed(mapping, aggregate, key),
        )
    for side, bound in (("lower", lower), ("upper", upper)):
        if bound is None:
            continue
        least = 1 if entry.on_ratio else 0
        if entry.one_sided and bound < least:
            raise SpecError(
                f"{aggregate} is never {'below 1' if least else 'negative'}.",
                f"Set a bound >= {least}, or null.",
                key=f"{key}.{side}",
                value=bound,
                proposed={f"{key}.{side}": get_usual_bounds(aggregate)[side == "upper"]},
            )
        if not entry.one_sided and abs(bound) > entry.greatest:
            raise SpecError(
                f"{aggregate} lies in [{entry.least:g}, {entry.greatest:g}].",
                key=f"{key}.{side}",
                value=bound,
                proposed={f"{key}.{side}": get_usual_bounds(aggregate)[side == "upper"]},
            )
    outermost = lower is None or lower <= (1 if entry.on_ratio and entry.one_sided else entry.least)
    if outermost and (upper is None or upper >= entry.greatest):
        raise SpecError(
            f"{aggregate} never lies outside, so the mask never acts.",
            key=f"{key}.lower",
            value=lower,
            alongside={f"{key}.upper": upper},
            proposed={f"{key}.upper": get_usual_bounds(aggregate)[1]},
        )
    return lower, upper


_TOKEN = math.log(1e5)
"""Largest commonly used bound on one token, in nats: outlier masks use ratios down to 1e-4."""
_MEAN = math.log(10.0)
"""Largest bound worth proposing on a unit's mean, in nats per token: policies diverge long before they reach it."""


def compute_arithmetic_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement that arithmetic allows; infinite for a sum over a unit's tokens.

    Example:
        >>> compute_arithmetic_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        20.0
    """
    return math.inf if _summed(mask) else mask.entry.at(EXP_CLAMP)


def compute_proposal_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement worth proposing as a bound; larger bounds are not used in practice.

    Example:
        >>> limit = compute_proposal_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        >>> round(math.exp(limit), 9)  # a mean ratio of 10
        10.0
    """
    if _summed(mask):
        return mask.entry.at(EXP_CLAMP)
    averaged = mask.entry.reduce == "batch" or (mask.level != "token" and mask.entry.reduce == "mean")
    return mask.entry.at(_MEAN if averaged else _TOKEN)


def _summed(mask: MaskSpec) -> bool:
    return mask.level != "token" and mask.entry.reduce == "sum"
