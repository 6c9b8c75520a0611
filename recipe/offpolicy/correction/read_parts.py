"""Read the parts of a correction from plain values (masks, weights, terms, options), and check each part separately.

``rules`` checks the parts together. Each function raises ``SpecError`` for a malformed value; its argument ``key`` is
the Hydra path that the error shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .correction_parts import BY_AGE, Alpha, KlRatio, KlWeightSpec, PenaltySpec, SupportUnknown
from .masks import AGGREGATES, MaskSpec, Ratio, get_usual_bounds
from .problem import SpecError
from .ratios import EXP_CLAMP
from .units import Level, MaskWhen, Sign, When
from .validation import (
    check_known_keys,
    read_bool,
    read_choice,
    read_factors,
    read_number,
    read_ordered_bounds,
    read_power,
    read_ratio_bounds,
    require_keys,
    usual_bound,
)
from .weights import GAMMA, Kind, WeightAggregate, WeightRatio, WeightSpec

_WITHOUT_AGE = {
    "ratio": "an age does not compare policies.",
    "lower": "the age of fresh tokens is 0, so a lower bound would reject them.",
    "delta": "delta bounds a mean of log ratios.",
    "budget": "budget bounds a mean of squares.",
    "by_staleness": "the factor multiplies the log of a bound on a ratio.",
    "by_position": "the factor multiplies the log of a bound on a ratio.",
}
"""Key that is meaningless for an age -> reason."""


def read_mask(mapping: Mapping[str, Any], key: str) -> MaskSpec:
    """Read a mask.

    Example:
        >>> opsm = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": 0.1, "when": "negative"}
        >>> read_mask(opsm, "correction.masks.opsm").limits
        (-0.1, inf)
    """
    if mapping.get("aggregate") == "staleness":
        return _read_age_mask(mapping, key)
    bound_keys = {"delta"} if "delta" in mapping else {"budget"} if "budget" in mapping else {"lower", "upper"}
    _check_one_way_to_bound(mapping, bound_keys, key)
    optional = ("sign", "by_staleness", "by_position")
    require_keys(mapping, {"ratio", "level", "aggregate", "when"} | bound_keys, key, optional)
    aggregate = read_choice(mapping, "aggregate", tuple(AGGREGATES), key)
    if (AGGREGATES[aggregate].reduce == "batch") != ("budget" in mapping):
        raise SpecError(
            "budget bounds only the aggregate second_moment.",
            key=f"{key}.aggregate",
            value=aggregate,
            alongside={f"{key}.{name}": mapping[name] for name in sorted(bound_keys)},
            **_match_aggregate_and_bound(mapping, key),
        )
    delta = budget = lower = upper = None
    if "delta" in mapping:
        delta = _read_delta(mapping["delta"], aggregate, key)
        lower = math.exp(-delta)
    elif "budget" in mapping:
        budget = _read_positive(mapping, "budget", key, "expected a mean of (log ratio)^2, a number > 0.", 0.04)
    else:
        lower, upper = _read_bounds(mapping, aggregate, key)
    mask = MaskSpec(
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
    _check_mask(mask, key)
    return mask


def _read_age_mask(mapping: Mapping[str, Any], key: str) -> MaskSpec:
    for name, why in ((name, why) for name, why in _WITHOUT_AGE.items() if name in mapping):
        raise SpecError(
            f"{why} For an age, only the bound upper can be set.",
            key=f"{key}.{name}",
            value=mapping[name],
            alongside={f"{key}.aggregate": "staleness"},
            removed={f"{key}.{name}": mapping[name]} if "upper" in mapping else None,
        )
    upper = mapping.get("upper", "???")
    whole = isinstance(upper, int | float) and not isinstance(upper, bool) and 0 <= upper < 2**53
    if not whole or upper % 1:
        reason = "expected the greatest age to keep, in versions of the weights: a whole number >= 0."
        raise SpecError.under(key, "upper", upper, reason, proposed={"upper": 4})
    require_keys(mapping, {"level", "aggregate", "upper"}, key, {"when", "sign"})
    level = read_choice(mapping, "level", Level, key)
    when = read_choice(mapping, "when", ("any", "negative", "positive"), key, "any")
    sign = read_choice(mapping, "sign", Sign, key, "row")
    mask = MaskSpec("rollout", level, "staleness", None, float(upper), when, sign)
    _check_mask(mask, key)
    return mask


def _check_mask(mask: MaskSpec, key: str) -> None:
    _check_selection(mask, key, {"when": "negative"} if mask.budget is None else {"sign": "row"})
    for name in ("by_staleness", "by_position"):
        if (value := getattr(mask, name)) is not None and not mask.entry.on_ratio:
            raise SpecError.under(
                key,
                name,
                list(value) if isinstance(value, tuple) else value,
                f"the bounds of {mask.aggregate} are not ratios, so they have no log to multiply.",
                f"Set {key}.{name}=null, or {key}.aggregate=geometric with bounds on a ratio.",
                alongside={"aggregate": mask.aggregate},
            )
    widest = max(abs(bound or 0.0) for bound in (mask.lower, mask.upper))
    if mask.level == "prefix" and mask.aggregate == "binary_tv_sum" and widest > 0.9:
        reason = "at level prefix, the bound also applies to the first token alone, which cannot differ by that much."
        alongside = {"lower": mask.lower, "level": "prefix"}
        raise SpecError.under(key, "upper", mask.upper, reason, alongside=alongside, proposed={"level": "sequence"})
    half_set = (mask.lower is None) != (mask.upper is None) and mask.delta is None
    if half_set and mask.level == "token" and mask.entry.of_log_ratios and mask.when == "any":
        side = "lower" if mask.lower is None else "upper"
        fix = f"Set {key}.{side}, or {key}.aggregate=any if one side is meant to stay open."
        reason = "bounds on single tokens need both sides."
        raise SpecError.under(key, side, None, reason, fix, proposed={"aggregate": "any"})
    if mask.entry.reduce == "batch" and (mask.level, mask.ratio, mask.when) != ("token", "rollout", "any"):
        raise SpecError.under(
            key,
            "aggregate",
            mask.aggregate,
            "its cutoff is computed once per batch, from the tokens' mu and pi_old, regardless of advantages.",
            alongside={name: getattr(mask, name) for name in ("ratio", "level", "when")},
            proposed={"ratio": "rollout", "level": "token", "when": "any"},
        )


def _check_selection(part: MaskSpec | WeightSpec, key: str, proposed: dict[str, Any]) -> None:
    """Check that ``sign`` is set only if ``when`` reads the advantage, and that ``post_tool`` can select tokens."""
    if part.sign == "token" and part.when in ("any", "post_tool"):
        fix = f"Set {key}.when=negative or positive, or {key}.sign=row."
        alongside = {"when": part.when}
        raise SpecError.under(
            key, "sign", "token", "no advantage is read.", fix, alongside=alongside, proposed=proposed
        )
    if part.when != "post_tool" or not (part.level == "prefix" or part.by_staleness is not None):
        return
    by_prefix = part.level == "prefix"
    reason = "a prefix also contains the tokens before the result." if by_prefix else "this part depends on age."
    raise SpecError.under(
        key,
        "when",
        "post_tool",
        f"post_tool needs level token, turn, version or sequence, and the same bound for all ages: {reason}",
        alongside={"level": "prefix"} if by_prefix else None,
        proposed={"when": "any"},
    )


def _check_one_way_to_bound(mapping: Mapping[str, Any], chosen: set[str], key: str) -> None:
    for name in sorted({"lower", "upper", "delta", "budget"} - chosen):
        if name in mapping:
            first = sorted(chosen)[0]
            away = first if mapping[first] in (None, "???") else name
            raise SpecError(
                "delta=d sets lower=exp(-d) and upper=null, and budget sets a cutoff for the whole batch.",
                "Set delta, or budget, or the two bounds.",
                key=f"{key}.{name}",
                value=mapping[name],
                alongside={f"{key}.{first}": mapping[first]},
                removed={f"{key}.{away}": mapping[away]},
            )


def _match_aggregate_and_bound(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the fix that makes the aggregate match its kind of bound, as arguments of SpecError."""
    if "budget" in mapping or "delta" in mapping:
        return {"proposed": {f"{key}.aggregate": "second_moment" if "budget" in mapping else "geometric"}}
    bounds = {f"{key}.{side}": mapping[side] for side in ("lower", "upper") if side in mapping}
    return {"proposed": {f"{key}.budget": 0.04}, "removed": bounds}


def _read_delta(value: Any, aggregate: str, key: str) -> float:
    delta = read_number(value, f"{key}.delta", nullable=False) if value != "???" else None
    entry = AGGREGATES[aggregate]
    if not entry.of_log_ratios:
        reason, alongside = "delta bounds a mean or a sum of log ratios.", {"aggregate": aggregate}
        fix = f"Set {key}.aggregate=geometric, or set lower and upper."
        proposed = {"aggregate": "geometric"}
        raise SpecError.under(key, "delta", value, reason, fix, alongside=alongside, proposed=proposed)
    if delta is None or delta < 0:
        reason = "a row is dropped if mean log(mu/pi) > delta, so delta must be a number >= 0, in nats per token."
        raise SpecError.under(key, "delta", value, reason, proposed={"delta": 0.1})
    if delta > EXP_CLAMP and entry.reduce == "mean":
        reason = f"a mean never exceeds {EXP_CLAMP:g} nats, so the mask has no effect."
        raise SpecError.under(key, "delta", delta, reason, proposed={"delta": 0.1})
    return delta


def _read_bounds(mapping: Mapping[str, Any], aggregate: str, key: str) -> tuple[float | None, float | None]:
    entry = AGGREGATES[aggregate]
    usual_lower, usual_upper = get_usual_bounds(aggregate)
    lower, upper = read_ratio_bounds(mapping, key) if entry.on_ratio else read_ordered_bounds(mapping, key)
    if lower is None and upper is None:
        both = mapping.get("level") == "token" and entry.of_log_ratios
        raise SpecError.under(
            key,
            "lower",
            None,
            "a mask with both sides open has no effect.",
            "Set a bound, or remove the mask.",
            alongside={"upper": None},
            proposed=({"lower": usual_lower} if both else {}) | {"upper": usual_upper},
        )
    for side, bound, usual in (("lower", lower, usual_lower), ("upper", upper, usual_upper)):
        least = 1 if entry.on_ratio else 0
        if bound is None:
            continue
        if entry.one_sided and bound < least:
            reason = f"{aggregate} is never {'below 1' if least else 'negative'}."
            fix = f"Set a bound >= {least}, or null."
            raise SpecError.under(key, side, bound, reason, fix, proposed={side: usual})
        if not entry.one_sided and abs(bound) > entry.greatest:
            reason = f"{aggregate} lies in [{entry.least:g}, {entry.greatest:g}]."
            raise SpecError.under(key, side, bound, reason, proposed={side: usual})
    outermost = lower is None or lower <= (1 if entry.on_ratio and entry.one_sided else entry.least)
    if outermost and (upper is None or upper >= entry.greatest):
        reason = f"{aggregate} never lies outside these bounds, so the mask has no effect."
        raise SpecError.under(key, "lower", lower, reason, alongside={"upper": upper}, proposed={"upper": usual_upper})
    return lower, upper


def read_weight(mapping: Mapping[str, Any], key: str = "correction.weight") -> WeightSpec:
    """Read a weight.

    Example:
        >>> read_weight({"level": "token", "kind": "truncate", "lower": None, "upper": 2}).upper
        2.0
    """
    optional = ("aggregate", "ratio", "normalize", "by_staleness", "by_position", "when", "sign")
    if mapping.get("kind") == "gamma":
        require_keys(mapping, {"level", "kind", *GAMMA}, key, (*optional, "lower", "upper"))
        mapping = {"lower": None, "upper": None, **mapping}
    else:
        require_keys(mapping, {"level", "kind", "lower", "upper"}, key, optional)
    kind = read_choice(mapping, "kind", Kind, key)
    lower, upper = read_ratio_bounds(mapping, key)
    _check_bounds_of_kind(kind, lower, upper, mapping, key)
    of_gamma = GAMMA if kind == "gamma" else ()
    weight = WeightSpec(
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
        **{name: _read_positive(mapping, name, key, "a number > 0.", 2.0) for name in of_gamma},
    )
    _check_scaled_bounds(weight, key)
    if weight.aggregate == "minimum" and weight.level != "prefix":
        reason, alongside = "minimum uses the smallest ratio in a token's prefix.", {"level": weight.level}
        raise SpecError.under(key, "aggregate", "minimum", reason, alongside=alongside, proposed={"level": "prefix"})
    _check_selection(weight, key, {"sign": "row"})
    if weight.normalize and weight.needs_step:
        raise SpecError.under(
            key,
            "normalize",
            True,
            "the weight is decided at each gradient step, so the batch's mean would depend on the split into "
            "micro-batches.",
            alongside={"ratio": "full"} if weight.ratio != "rollout" else {"when": weight.when},
            proposed={"normalize": False},
        )
    return weight


def _check_bounds_of_kind(
    kind: Kind, lower: float | None, upper: float | None, mapping: Mapping[str, Any], key: str
) -> None:
    for side, bound in (("lower", lower), ("upper", upper)):
        if bound is not None and abs(math.log(bound)) > EXP_CLAMP:
            raise SpecError(
                f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, so a weight is always in "
                f"[{math.exp(-EXP_CLAMP):.3g}, {math.exp(EXP_CLAMP):.3g}].",
                "Set a bound inside this range, or null to leave that side open.",
                key=f"{key}.{side}",
                value=bound,
                proposed=usual_bound(mapping, side, key),
            )
    bounds, number = {"lower": lower, "upper": upper}, (lower is not None) + (upper is not None)
    if kind == "truncate" and number == 2:
        reason, fix = "kind 'truncate' bounds only one side.", f"Set {key}.kind=clip, or one of the bounds to null."
        raise SpecError.under(key, "lower", lower, reason, fix, alongside={"upper": upper}, proposed={"kind": "clip"})
    if kind == "clip" and number < 2:
        reason, fix = "'clip' bounds both sides.", f"Set both bounds, or set {key}.kind=truncate."
        proposed: dict[str, Any] = {"kind": "truncate"} if number else {"lower": 0.5, "upper": 2.0}
        raise SpecError.under(key, "kind", kind, reason, fix, alongside=bounds, proposed=proposed)
    if kind == "gamma" and number:
        side = "lower" if upper is None else "upper"
        proposed = {"lower": None, "upper": None}
        alongside = {"kind": "gamma"}
        raise SpecError.under(
            key, side, mapping[side], "'gamma' has no bounds.", alongside=alongside, proposed=proposed
        )
    if kind == "reject" and not number:
        reason, fix = "nothing would be rejected.", f"Set a bound, or set {key}.kind=truncate."
        raise SpecError.under(key, "kind", kind, reason, fix, alongside=bounds, proposed={"upper": 2.0})


def _check_scaled_bounds(weight: WeightSpec, key: str) -> None:
    logs = [abs(math.log(bound)) for bound in (weight.lower, weight.upper) if bound is not None]
    if weight.by_staleness is not None and (not logs or max(logs) * max(weight.by_staleness) > EXP_CLAMP):
        reason = "there is no bound to multiply."
        if logs:
            reason = (
                f"|log bound| {max(logs):g} times {max(weight.by_staleness):g} is beyond the +-{EXP_CLAMP:g} nats at "
                "which log-ratios are clamped, so this bound has no effect at that age."
            )
        fix = f"Set {key}.by_staleness=null, or a bound and factors below that."
        raise SpecError.under(key, "by_staleness", list(weight.by_staleness), reason, fix)
    if weight.by_position is not None and not logs:
        reason, proposed = "there is no bound to scale.", {"by_position": None}
        raise SpecError.under(key, "by_position", weight.by_position, reason, proposed=proposed)


def _read_positive(mapping: Mapping[str, Any], name: str, key: str, reason: str, usual: float) -> float:
    value = read_number(mapping[name], f"{key}.{name}", nullable=False)
    if value is None or value <= 0:
        raise SpecError.under(key, name, mapping[name], reason, proposed={name: usual})
    return value


def read_kl_weight(mapping: Mapping[str, Any], key: str = "correction.kl_weight") -> KlWeightSpec:
    """Read the weight of the KL loss.

    Example:
        >>> read_kl_weight({"ratio": "ppo", "upper": None})
        KlWeightSpec(ratio='ppo', upper=None)
    """
    require_keys(mapping, {"ratio", "upper"}, key)
    _, upper = read_ratio_bounds({"lower": None, **mapping}, key)
    if upper is not None and upper <= 1:
        reason, fix = "it would act even if both policies agree.", f"Set {key}.upper=2.0 for example, or null."
        raise SpecError.under(key, "upper", upper, reason, fix, proposed={"upper": 2.0})
    return KlWeightSpec(read_choice(mapping, "ratio", KlRatio, key), upper)


def read_penalty(mapping: Mapping[str, Any], key: str = "correction.penalty") -> PenaltySpec:
    """Read the penalty on the squared log-ratio.

    Example:
        >>> read_penalty({"ratio": "full", "coefficient": 1}).coefficient
        1.0
    """
    require_keys(mapping, {"ratio", "coefficient"}, key)
    reason = "expected a number > 0, by which the mean of (log r)^2 is multiplied."
    coefficient = _read_positive(mapping, "coefficient", key, reason, 0.001)
    return PenaltySpec(read_choice(mapping, "ratio", KlRatio, key), coefficient)


def read_kl_clip(value: Any, key: str = "correction.kl_clip") -> tuple[float, float] | None:
    """Read the two bounds around 1 on pi / pi_old in the KL loss.

    Example:
        >>> read_kl_clip({"lower": 0.8, "upper": 1.2})
        (0.8, 1.2)
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        # A single number is read like PPO's own clip: it is the distance of both bounds from 1.
        width = value if isinstance(value, float) and 0 < value < 1 else 0.2
        meant = {key: {"lower": round(1 - width, 6), "upper": round(1 + width, 6)}}
        raise SpecError("expected a mapping.", key=key, value=value, meant=meant)
    check_known_keys(value, {"lower", "upper"}, key)
    bounds = {"lower": None, "upper": None, **value}
    require_keys(bounds, {"lower", "upper"}, key)
    lower, upper = read_ratio_bounds(bounds, key)
    if lower is None or upper is None or not lower < 1 < upper:
        reason = "expected two bounds around 1 on pi / pi_old, like the clip range of PPO."
        value = {"lower": lower, "upper": upper}
        raise SpecError(reason, key=key, value=value, proposed={f"{key}.lower": 0.8, f"{key}.upper": 1.2})
    return lower, upper


def read_alpha(value: Any) -> Alpha | None:
    """Read the weight of log pi in ``proximal=loglinear``.

    Example:
        >>> read_alpha(0.5), read_alpha("by_age")
        (0.5, 'by_age')
    """
    return BY_AGE if value == BY_AGE else read_number(value, "correction.alpha")


def read_support(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Read the ``support`` fields from the plain values under ``correction``.

    Example:
        >>> read_support({"support": "engine", "support_size": 8})
        {'support': 'engine', 'support_unknown': 'mask', 'support_size': 8, 'support_min_p': None}
    """
    support = mapping.get("support")
    if support is not None:
        read_choice(mapping, "support", ("engine",), "correction")
    unknown = read_choice(mapping, "support_unknown", SupportUnknown, "correction", "mask")
    size = read_count(
        mapping, "support_size", "expected a number of tokens, 1 or more, or null to derive it from top-k."
    )
    min_p = read_number(mapping.get("support_min_p"), "correction.support_min_p")
    if min_p is not None and not 0 < min_p < 1:
        reason = "expected a share of the likeliest token's probability, above 0 and below 1, or null for none."
        raise SpecError.under("correction", "support_min_p", min_p, reason, proposed={"support_min_p": 0.1})
    fields = {"support": support, "support_unknown": unknown, "support_size": size, "support_min_p": min_p}
    unread = {"support_unknown": "mask", "support_size": None, "support_min_p": None}
    for name, off in unread.items() if support is None else ():
        if fields[name] != off:
            fix = f"Set correction.support=engine, or correction.{name}={'null' if off is None else off}."
            reason = "read only with correction.support=engine."
            raise SpecError.under("correction", name, fields[name], reason, fix, proposed={"support": "engine"})
    return fields


def read_count(mapping: Mapping[str, Any], name: str, reason: str, usual: int | None = None) -> int | None:
    """Read a whole number of at least 1, or None, from the plain values under ``correction``.

    Example:
        >>> read_count({"centering": 20}, "centering", "expected a number of tokens.")
        20
    """
    value = mapping.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise SpecError.under("correction", name, value, reason, proposed={name: usual})
