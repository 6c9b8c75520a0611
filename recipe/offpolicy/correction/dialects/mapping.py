"""Reading another framework's keys: values or defaults, with messages in its own names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..problem import SpecError
from ..ratios import EXP_CLAMP
from ..validation import known_keys, number


def read(
    source: Mapping[str, Any] | Any, defaults: Mapping[str, Any], where: str, ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """Values of all keys of ``defaults``, from a mapping or from the attributes of an object."""
    if isinstance(source, Mapping):
        known_keys(source, {*defaults, *ignored}, where)
        return {**defaults, **{key: source[key] for key in defaults if key in source}}
    if not any(hasattr(source, key) for key in defaults):
        raise SpecError(f"expected a mapping with keys such as {next(iter(defaults))}.", key=where, value=source)
    return {key: getattr(source, key, default) for key, default in defaults.items()}


def one_of(value: Any, options: Iterable[str], key: str, *, optional: bool = True) -> str | None:
    if value is None and optional:
        return None
    if value not in options:
        choices = ", ".join([*(["null"] if optional else []), *options])
        raise SpecError("no such choice.", f"Set one of {choices}.", key=key, value=value)
    return str(value)


def ratio(value: Any, key: str) -> float | None:
    """A bound on a ratio that a log-ratio clamped to +-20 nats can reach."""
    bound = number(value, key)
    if bound is None:
        return None
    if bound <= 0:
        fix = "Set a bound above 0, or null to leave a side open."
        raise SpecError("ratios are positive.", fix, key=key, value=value)
    if abs(math.log(bound)) > EXP_CLAMP:
        raise SpecError(
            f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, so that this bound never acts.",
            f"Set one between {math.exp(-EXP_CLAMP):.3g} and {math.exp(EXP_CLAMP):.3g}.",
            key=key,
            value=value,
        )
    return bound


def mask(
    level: str, aggregate: str, lower: float | None, upper: float | None, ratio: str = "rollout"
) -> dict[str, Any]:
    bounds = {"lower": lower, "upper": upper}
    return {"ratio": ratio, "level": level, "aggregate": aggregate, "when": "any", **bounds}
