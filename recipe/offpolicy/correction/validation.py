"""Readers of a correction's plain values; each error contains a key, its value, a reason and a fix."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

from .masks import get_usual_bounds
from .problem import SpecError, find_closest
from .units import Level

_MISSING = "???"  # OmegaConf's marker of a missing mandatory value
_IN_USE = {
    "coefficient": 0.001,
    "delta": 0.1,
    "budget": 0.04,
    "kind": "truncate",
    "ratio": "rollout",
    "when": "any",
    "sign": "row",
}
_ELSEWHERE = dict.fromkeys(("cap", "max", "high", "clip", "threshold", "upper_bound"), "upper") | dict.fromkeys(
    ("min", "low", "floor", "lower_bound"), "lower"
)
"""Names of bounds in other frameworks."""
_TRUTH = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def require_mapping(value: Any, key: str, fix: str, off: Any = ...) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping.

    The error proposes ``fix``; if the value is null or false, the error explains how to switch the key off.

    Args:
        off: the value that switches the key off; by default, the error proposes to remove the key.

    Example:
        >>> require_mapping({"level": "token"}, "correction.weight", "Remove it.")
        {'level': 'token'}
    """
    if not isinstance(value, Mapping):
        away = value is None or value is False
        meant = {key: off} if away and off is not ... else None
        removed = {key: value} if away and off is ... else None
        raise SpecError("expected a mapping.", fix, key=key, value=value, meant=meant, removed=removed)
    return value


def check_known_keys(mapping: Mapping[str, Any], known: Iterable[str], key: str) -> None:
    """Check that a mapping has known keys only.

    Example:
        >>> check_known_keys({"upper": 2.0}, ("lower", "upper"), "correction.weight")
        >>> check_known_keys({"uper": 2.0}, ("lower", "upper"), "correction.weight")
        Traceback (most recent call last):
            ...
        recipe.offpolicy.correction.problem.SpecError: correction.weight.uper=2.0: unknown key. ...
    """
    known = set(known)
    if unknown := {str(name): value for name, value in mapping.items() if name not in known}:
        name = min(unknown)
        value = unknown[name]
        near = _ELSEWHERE.get(name.lower()) or find_closest(name, sorted(known))
        meant = _meant(f"{key}.{near}", value) or {f"{key}.{near}": value} if near in known else {}
        if isinstance(value, Mapping) or value == _MISSING:
            meant = {}
        names = list(meant) or [f"{key}.{each}" for each in known if each == near]
        raise SpecError(
            "unknown key.",
            f"Did you mean {' and '.join(names)}?" if names else f"Known under {key}: {', '.join(sorted(known))}.",
            key=f"{key}.{name}",
            value=value,
            meant=meant,
            removed={f"{key}.{name}": value} if meant else None,
        )


def require_keys(mapping: Mapping[str, Any], required: Iterable[str], key: str, optional: Iterable[str] = ()) -> None:
    """Check that a mapping has values for all required keys, and no other keys except the optional ones.

    Example:
        >>> require_keys({"lower": None, "upper": 2.0}, ("lower", "upper"), "correction.weight")
    """
    required = set(required)
    check_known_keys(mapping, required | set(optional), key)
    left_open = sorted((required - set(mapping)) | {name for name, value in mapping.items() if value == _MISSING})
    if "level" in left_open:
        _refuse_without_level(mapping, left_open, key)
    in_use = {each: value for name in left_open for each, value in propose_value(mapping, name, key).items()}
    for name in left_open:
        hint = "null leaves that side open" if name in {"lower", "upper"} else "it has no default"
        published = " OPSM has no published default." if name == "delta" else ""
        raise SpecError(
            f"required and not set.{published}" if name in mapping else f"not set; {hint}.",
            f"Set {key}.{name}=...",
            key=f"{key}.{name}",
            value=_MISSING,
            proposed=in_use,
        )


def _refuse_without_level(mapping: Mapping[str, Any], left_open: list[str], key: str) -> None:
    """Reject a weight or mask without a level, because the level has no default."""
    kind = "mask" if key.startswith("correction.masks.") else "weight"
    others = [name for name in left_open if name not in ("level", "lower", "upper")]
    given = ", ".join(f"{key}.{name}" for name in mapping if name not in left_open)
    if not others:
        *levels, last = get_args(Level)
        fix = f"Set {key}.level={', '.join(levels)} or {last}."
        reason = "required and not set." if "level" in mapping else "this key is not set and has no default."
        raise SpecError(reason, fix, key=f"{key}.level", value=_MISSING)
    example = "tis_token or tis_sequence" if kind == "weight" else "gsm"
    raise SpecError(
        f"{given or 'this key'} does not belong to any chosen {kind}: {', '.join(left_open)} are not set.",
        f"Choose an option that has this {kind}, such as {example}, in correction=[...]; or set all of its keys.",
        key=key,
        value=dict(mapping),
    )


def read_choice(mapping: Mapping[str, Any], name: str, options: Any, key: str, default: str | None = None) -> Any:
    """Read a value that must be one of the options in a Literal type or a tuple.

    Example:
        >>> read_choice({"kind": "clip"}, "kind", ("clip", "reject"), "correction.weight")
        'clip'
    """
    allowed = get_args(options) or options
    if (value := mapping.get(name, default)) not in allowed:
        near = find_closest(str(value), allowed, 0.7)
        proposed = propose_value(mapping, name, key).get(f"{key}.{name}", allowed[0])
        in_use = default or (proposed if proposed in allowed else allowed[0])
        guessed = None if name == "level" else in_use
        raise SpecError(
            "no such choice.",
            f"Set one of {', '.join(allowed)}.",
            key=f"{key}.{name}",
            value=value,
            meant={f"{key}.{name}": near} if near is not None else None,
            proposed={f"{key}.{name}": guessed} if guessed is not None else None,
        )
    return cast(Any, value)


def read_bool(mapping: Mapping[str, Any], name: str, key: str) -> bool:
    """Read True or False; False if the key is left out.

    Example:
        >>> read_bool({"normalize": True}, "normalize", "correction.weight")
        True
    """
    value = mapping.get(name, False)
    if not isinstance(value, bool):
        meant = {f"{key}.{name}": _TRUTH[text]} if (text := str(value).lower()) in _TRUTH else None
        reason, fix, proposed = "not a truth value.", "Set true or false.", {f"{key}.{name}": False}
        raise SpecError(reason, fix, key=f"{key}.{name}", value=value, meant=meant, proposed=proposed)
    return value


def read_number(value: Any, key: str, *, nullable: bool = True) -> float | None:
    """Read a finite number or None; ``nullable`` affects only error messages.

    Example:
        >>> read_number(2, "correction.weight.upper")
        2.0
    """
    if value is None:
        return None
    usual = _IN_USE.get(key.rpartition(".")[2])
    proposed = {} if nullable or usual is None else {key: usual}
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        reason = f"expected a number{' or null' if nullable else ''}, not {type(value).__name__}."
        raise SpecError(reason, key=key, value=value, meant=_meant(key, value), proposed=proposed)
    try:
        converted = float(value)
    except OverflowError:  # an integer outside float64's range
        converted = math.inf
    if not math.isfinite(converted):
        fix = "Write null for an open side." if nullable else ""
        meant = {key: None} if nullable and math.isinf(converted) else None
        raise SpecError("expected a finite number.", fix, key=key, value=value, meant=meant, proposed=proposed)
    return converted + 0.0  # turns -0.0 into 0.0, also in the fingerprint


def read_factors(mapping: Mapping[str, Any], key: str) -> tuple[float, ...] | None:
    """Read ``by_staleness``: the factors that multiply |log bound| at age 0, 1, ...; None if it is left out or null.

    Example:
        >>> read_factors({"by_staleness": [1, 1.5]}, "correction.weight")
        (1.0, 1.5)
    """
    value = mapping.get("by_staleness")
    if value is None:
        return None
    if mapping.get("level") == "prefix":
        reason = "the oldest token of a prefix would set the bounds of all tokens after it."
        off = {"by_staleness": None}
        raise SpecError.under(key, "by_staleness", value, reason, alongside={"level": "prefix"}, proposed=off)
    numbers = [each for each in value if _is_factor(each)] if isinstance(value, list | tuple) else []
    if not numbers or len(numbers) != len(value):
        reason = "expected factors of |log bound| at age 0, 1, ... versions, a list of positive finite numbers."
        fix = f"Set {key}.by_staleness=[1.0,1.5,2.0] for example, or null for bounds that are the same at every age."
        raise SpecError.under(key, "by_staleness", value, reason, fix)
    return tuple(map(float, numbers))


def read_power(mapping: Mapping[str, Any], key: str) -> float | None:
    """Read ``by_position``: t to this power multiplies |log bound| at the t-th token; None if it is left out.

    Example:
        >>> read_power({"by_position": 0.5, "level": "prefix"}, "correction.weight")
        0.5
    """
    power = read_number(mapping.get("by_position"), f"{key}.by_position")
    if power is None:
        return None
    if not -1 <= power <= 1 or not power:
        reason = "expected an exponent for the token's position, in [-1, 1] and not 0."
        raise SpecError.under(key, "by_position", power, reason, proposed={"by_position": 0.5})
    if mapping.get("level") != "prefix":
        raise SpecError.under(
            key, "by_position", power, "this key is read only at level prefix.", proposed={"level": "prefix"}
        )
    return power


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def read_numbers(value: Any) -> list[float]:
    """Read a number, or two bounds written ``0.99_1.01`` as in verl, or ``[0.99,1.01]``, from a value.

    Example:
        >>> read_numbers("0.99_1.01"), read_numbers("[0.99, 1.01]"), read_numbers([1.01]), read_numbers("abc")
        ([0.99, 1.01], [0.99, 1.01], [1.01], [])
    """
    parts = re.split("[_,]", value.strip("[]() ")) if isinstance(value, str) else value
    parts = parts if isinstance(parts, list | tuple) else [parts]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError, OverflowError):
        return []
    return numbers if len(numbers) == len(parts) and all(map(math.isfinite, numbers)) else []


def _meant(key: str, value: Any) -> dict[str, Any]:
    """Propose the number or the two bounds that a value contains; empty if the value contains neither."""
    owner, _, name = key.rpartition(".")
    numbers = sorted(read_numbers(value))
    if len(numbers) == 2 and name in ("lower", "upper"):
        return {f"{owner}.lower": numbers[0], f"{owner}.upper": numbers[1]}
    return {key: numbers[0]} if len(numbers) == 1 else {}


def read_ordered_bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """Read ``lower`` and ``upper``, and check that ``lower`` <= ``upper``; None leaves a side unbounded.

    Example:
        >>> read_ordered_bounds({"lower": None, "upper": 0.2}, "correction.masks.kl")
        (None, 0.2)
    """
    lower, upper = (read_number(mapping[side], f"{key}.{side}") for side in ("lower", "upper"))
    if lower is not None and upper is not None and lower > upper:
        swapped = {f"{key}.lower": upper, f"{key}.upper": lower}
        other = {f"{key}.upper": upper}
        reason, fix = "nothing lies between.", "Swap the bounds."
        raise SpecError(reason, fix, key=f"{key}.lower", value=lower, alongside=other, meant=swapped)
    return lower, upper


def read_ratio_bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """Read bounds on a ratio, which must be positive.

    Example:
        >>> read_ratio_bounds({"lower": 0.5, "upper": 2}, "correction.weight")
        (0.5, 2.0)
    """
    for side in ("lower", "upper"):
        bound = read_number(mapping[side], f"{key}.{side}")
        if bound is not None and bound <= 0:
            fix, proposed = "Set a bound > 0, or null to leave it open.", usual_bound(mapping, side, key)
            raise SpecError("ratios are positive.", fix, key=f"{key}.{side}", value=bound, proposed=proposed)
    return read_ordered_bounds(mapping, key)


def usual_bound(mapping: Mapping[str, Any], side: str, key: str) -> dict[str, Any]:
    """Propose a common value for a malformed bound, ``key.side`` -> number; empty if it would cross the other bound.

    Example:
        >>> usual_bound({"aggregate": "geometric", "lower": 0.99}, "upper", "correction.masks.gsm")
        {'correction.masks.gsm.upper': 1.01}
    """
    other = "lower" if side == "upper" else "upper"
    proposed = propose_value({**mapping, other: None}, side, key)[f"{key}.{side}"]
    alongside = mapping.get(other)
    if proposed is None or (isinstance(alongside, int | float) and (proposed < alongside) == (side == "upper")):
        return {}
    return {f"{key}.{side}": proposed}


def propose_value(mapping: Mapping[str, Any], name: str, key: str) -> dict[str, Any]:
    """Propose a value for a missing or malformed key: null for a bound if the other bound is set, else a common value.

    Args:
        mapping: all keys of the weight or mask.

    Returns:
        ``key.name`` -> the value; empty if there is no common value.

    Example:
        >>> propose_value({"lower": 0.5}, "upper", "correction.masks.gsm")
        {'correction.masks.gsm.upper': None}
    """
    full = f"{key}.{name}"
    if name in ("lower", "upper"):
        other = mapping.get("upper" if name == "lower" else "lower")
        if isinstance(other, int | float) and other > 0 and mapping.get("kind") != "clip":
            return {full: None}
        weighs = "kind" in mapping and mapping.get("aggregate") != "geometric"
        lower, upper = get_usual_bounds("product" if weighs else str(mapping.get("aggregate", "product")))
        open_below = name == "lower" and mapping.get("kind") == "truncate"
        return {full: None if open_below else lower if name == "lower" else upper}
    if name == "aggregate":
        return {full: "product" if "kind" in mapping else "second_moment" if "budget" in mapping else "geometric"}
    return {full: _IN_USE[name]} if name in _IN_USE else {}


def check_metric_name(name: str, key: str, mask: Any = None) -> str:
    """Check a name for use in metric names; "min" and "max" are not allowed, because they select verl's reduction.

    Args:
        mask: the value under this name, as given.

    Example:
        >>> check_metric_name("gsm", "correction.masks")
        'gsm'
    """
    if not _NAME.fullmatch(name) or "min" in name or "max" in name:
        raise SpecError(
            "expected lower-case letters, digits and _, without 'min' and 'max', because verl uses these substrings "
            "to choose how to reduce a metric.",
            "Rename the mask.",
            key=f"{key}.{name}",
            value=mask,
            meant={f"{key}.{_renamed(name)}": mask},
            removed={f"{key}.{name}": mask},
        )
    return name


def rename_for_metrics(name: str) -> str:
    """Replace the substrings "min" and "max", which would change how verl reduces a metric.

    Example:
        >>> rename_for_metrics("paper/minpro")
        'paper/leastpro'
    """
    while "min" in name or "max" in name:
        name = name.replace("min", "least").replace("max", "greatest")
    return name


def _renamed(name: str) -> str:
    """Rename a mask so that its name is allowed."""
    plain = rename_for_metrics(re.sub(r"[^a-z0-9_]", "", name.lower().replace("-", "_")))
    return plain if _NAME.fullmatch(plain) else f"mask_{plain}".rstrip("_")
