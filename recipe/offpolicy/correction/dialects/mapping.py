"""Readers of another framework's keys, with its defaults and with error messages that use its names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..problem import SpecError
from ..ratios import EXP_CLAMP
from ..validation import check_known_keys, read_number


def read_options(
    source: Mapping[str, Any] | Any, defaults: Mapping[str, Any], where: str, ignored: Iterable[str] = ()
) -> dict[str, Any]:
    """Read the values of all keys of ``defaults`` from a mapping, or from the attributes of an object.

    Example:
        >>> read_options({"cap": 3.0}, {"cap": 2.0, "level": None}, "tis")
        {'cap': 3.0, 'level': None}
    """
    if isinstance(source, Mapping):
        check_known_keys(source, {*defaults, *ignored}, where)
        return {**defaults, **{key: source[key] for key in defaults if key in source}}
    if not any(hasattr(source, key) for key in defaults):
        raise SpecError(f"expected a mapping with keys such as {next(iter(defaults))}.", key=where, value=source)
    return {key: getattr(source, key, default) for key, default in defaults.items()}


def read_choice(value: Any, options: Iterable[str], key: str, *, optional: bool = True) -> str | None:
    """Read one of ``options``; null is read as None if the choice is optional.

    Example:
        >>> read_choice("token", ("token", "sequence"), "tis.level")
        'token'
    """
    if value is None and optional:
        return None
    options = tuple(options)
    if value not in options:
        choices = ", ".join([*(["null"] if optional else []), *options])
        raise SpecError("no such choice.", f"Set one of {choices}.", key=key, value=value)
    return options[options.index(value)]


def read_ratio_bound(value: Any, key: str, *, zero_opens: bool = False) -> float | None:
    """Read a bound on a ratio; it must be a value that a log-ratio clamped to +-20 nats can reach.

    Args:
        zero_opens: 0 leaves the side open, as null does.

    Example:
        >>> read_ratio_bound(2, "tis.cap")
        2.0
    """
    bound = read_number(value, key)
    if bound is None or (zero_opens and bound == 0):
        return None
    if bound <= 0:
        fix = "Set a bound above 0, or null to leave a side open."
        raise SpecError("ratios are positive.", fix, key=key, value=value)
    if abs(math.log(bound)) > EXP_CLAMP:
        raise SpecError(
            f"log-ratios are clamped to +-{EXP_CLAMP:g} nats, so this bound never acts.",
            f"Set one between {math.exp(-EXP_CLAMP):.3g} and {math.exp(EXP_CLAMP):.3g}.",
            key=key,
            value=value,
        )
    return bound


def read_width(value: Any, key: str) -> float:
    """Read a number of at least 0 from a key that has a default.

    Example:
        >>> read_width(0.2, "loss.dppo_mask_low")
        0.2
    """
    width = read_number(value, key)
    if width is None or width < 0:
        raise SpecError("expected a number of at least 0.", key=key, value=value)
    return width


def build_dppo_masks(low: float, high: float) -> dict[str, Any]:
    """Build masks of tokens whose p_pi is more than ``high`` above or ``low`` below p_mu and would move further away.

    For a width of 1 or more, no mask is built, because no difference of probabilities exceeds such a width.

    Example:
        >>> list(build_dppo_masks(0.2, 1.0))
        ['dppo_negative']
    """
    up, down = (
        build_mask("token", "binary_tv", None, high, "full") | {"when": "positive", "sign": "token"},
        build_mask("token", "binary_tv", -low, None, "full") | {"when": "negative", "sign": "token"},
    )
    return ({"dppo_positive": up} if high < 1 else {}) | ({"dppo_negative": down} if low < 1 else {})


def build_mask(
    level: str, aggregate: str, lower: float | None, upper: float | None, ratio: str = "rollout"
) -> dict[str, Any]:
    """Build the plain values of a mask that applies to advantages of either sign.

    Example:
        >>> build_mask("token", "product", 0.5, 2.0)["when"]
        'any'
    """
    bounds = {"lower": lower, "upper": upper}
    return {"ratio": ratio, "level": level, "aggregate": aggregate, "when": "any", **bounds}


def read_flag(value: Any, key: str) -> bool:
    """Read True or False from a key that has a default.

    Example:
        >>> read_flag(True, "use_tis")
        True
    """
    if not isinstance(value, bool):
        raise SpecError("not a truth value.", "Set true or false.", key=key, value=value)
    return value


def check_weight_of_rows(weight: Mapping[str, Any] | None, name: str, key: str, value: Any) -> None:
    """Refuse per-token or per-turn weights if the base loss has one ratio per row and differentiates the row's mean.

    The sum of a row's weights then scales the gradient of the whole row. verl's ``gspo`` multiplies the gradient of
    each token by the token's own weight.

    Raises:
        SpecError: the weight's level is not ``sequence``.

    Example:
        >>> check_weight_of_rows(build_weight("sequence", None, 2.0), "TRL", "importance_sampling_level", "sequence")
    """
    if weight is not None and weight["level"] != "sequence":
        reason = (
            f"{name} multiplies the gradient of a row's ratio by the weights of its tokens, whereas verl's gspo "
            "multiplies each token's own gradient."
        )
        raise refuse(reason, key, value)


def build_weight(
    level: str, lower: float | None, upper: float | None, *, reject: bool = False, **more: Any
) -> dict[str, Any]:
    """Build the plain values of a weight with the given bounds; a lower bound of 0 leaves that side open.

    Example:
        >>> build_weight("token", 0.0, 2.0)["kind"], build_weight("token", 0.5, 2.0)["kind"]
        ('truncate', 'clip')
    """
    lower = lower or None
    kind = "reject" if reject else "truncate" if lower is None or upper is None else "clip"
    return {"level": level, "kind": kind, "lower": lower, "upper": upper, **more}


def refuse(reason: str, key: str, value: Any, fix: str = "") -> SpecError:
    """Build the error for an option that has no equivalent here.

    Example:
        >>> str(refuse("it has no equivalent here.", "roll.is_weight.detach", False))
        'roll.is_weight.detach=false: it has no equivalent here.'
    """
    return SpecError(reason, fix, key=key, value=value)
