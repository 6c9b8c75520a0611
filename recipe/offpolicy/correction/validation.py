"""Reading plain values, with messages that name the key, the value and the fix.

A mistyped threshold that is taken for a valid one degrades a run in silence.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

_MISSING = "???"  # what OmegaConf leaves where a value is mandatory
_IN_USE = {"delta": 0.1, "budget": 0.04, "kind": "truncate", "ratio": "rollout", "when": "any", "sign": "row"}
_BANDS: dict[str, tuple[float | None, float | None]] = {
    "product": (0.5, 2.0),
    "geometric": (0.99, 1.01),
    "any": (0.5, 2.0),
    "binary_tv": (-0.2, 0.2),
    "k1_sum": (-0.7, 0.7),
    "k1_mean": (-0.01, 0.01),
    "k1_max": (-0.7, 0.7),
}
"""Aggregate -> bounds in use; the others are never negative: from above 0.01 for a mean, else 0.2."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class SpecError(ValueError):
    """A correction that cannot be what was meant; the message names key, value and fix.

    Attributes:
        key, value: as they were given; an empty key where the message alone tells.
        overrides: key -> the value that mends it; empty where none is known.
        removed: a key that is to be taken away before, whose value is ``value``; "" for none.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        value: Any = None,
        overrides: Mapping[str, Any] | None = None,
        removed: str = "",
    ) -> None:
        super().__init__(message)
        self.key, self.value, self.removed = key, value, removed
        self.overrides = dict(overrides or {})


def mapping_at(value: Any, key: str) -> Mapping[str, Any]:
    """``value`` if it is a mapping."""
    if not isinstance(value, Mapping):
        shown = "null" if value is None else repr(value)
        whole: dict[str, Any] = {key: {} if key == "correction.masks" else None}
        mask = key.startswith("correction.masks.")
        raise SpecError(
            f"{key}={shown}: expected a mapping. Choose it by a group option, e.g. correction=gsm.",
            key=key,
            value=value,
            overrides=None if mask else whole,
            removed=key if mask else "",
        )
    return value


def known_keys(mapping: Mapping[str, Any], known: Iterable[str], key: str) -> None:
    """Nothing but known keys."""
    known = set(known)
    if unknown := {str(name): value for name, value in mapping.items() if name not in known}:
        name = min(unknown)
        value = unknown[name]
        near = difflib.get_close_matches(name, known, 1) if not isinstance(value, Mapping) else []
        raise SpecError(
            f"{key}.{name}={value!r}: unknown key. Known under {key}: {', '.join(sorted(known))}.",
            key=f"{key}.{name}",
            value=value,
            overrides={f"{key}.{near[0]}": value} if near and value != _MISSING else None,
            removed=f"{key}.{name}",
        )


def require_keys(mapping: Mapping[str, Any], required: Iterable[str], key: str, optional: Iterable[str] = ()) -> None:
    """All required keys, with values, and no others than the optional ones."""
    required = set(required)
    known_keys(mapping, required | set(optional), key)
    left_open = sorted((required - set(mapping)) | {name for name, value in mapping.items() if value == _MISSING})
    in_use = {each: value for name in left_open for each, value in usual(mapping, name, key).items()}
    for name in sorted(required - set(mapping)):
        hint = "null leaves that side open" if name in {"lower", "upper"} else "it has no default"
        raise SpecError(
            f"{key}.{name} is not set ({hint}). Set {key}.{name}=...",
            key=f"{key}.{name}",
            overrides=in_use,
        )
    for name in sorted(set(mapping)):
        if mapping[name] == _MISSING:
            hint = " OPSM has no published default." if name == "delta" else ""
            raise SpecError(
                f"{key}.{name} is required and not set.{hint} Set {key}.{name}=...",
                key=f"{key}.{name}",
                overrides=in_use,
            )


def choice(mapping: Mapping[str, Any], name: str, options: Any, key: str, default: str | None = None) -> Any:
    """One of the options of a Literal type."""
    allowed = get_args(options)
    if (value := mapping.get(name, default)) not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        in_use = default or usual(mapping, name, key).get(f"{key}.{name}", allowed[0])
        raise SpecError(
            f"{key}.{name}={value!r}: set one of {', '.join(allowed)}.",
            key=f"{key}.{name}",
            value=value,
            overrides={f"{key}.{name}": near[0] if near else in_use},
        )
    return cast(Any, value)


def truth(mapping: Mapping[str, Any], name: str, key: str) -> bool:
    """True or false; false where it is left out."""
    value = mapping.get(name, False)
    if not isinstance(value, bool):
        raise SpecError(
            f"{key}.{name}={value!r}: set true or false.",
            key=f"{key}.{name}",
            value=value,
            overrides={f"{key}.{name}": False},
        )
    return value


def number(value: Any, key: str, *, nullable: bool = True) -> float | None:
    """A finite number or None; ``nullable`` is for messages."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        expected = "a number or null" if nullable else "a number"
        raise SpecError(
            f"{key}={value!r}: expected {expected}, not {type(value).__name__}. Set {key}=0.5, unquoted.",
            key=key,
            value=value,
            overrides={key: _unquoted(value, None if nullable else _IN_USE.get(key.rpartition(".")[2]))},
        )
    try:
        converted = float(value)
    except OverflowError:  # an integer beyond float64
        converted = math.inf
    if not math.isfinite(converted):
        raise SpecError(
            f"{key}={value}: expected a finite number. Write null for an open side.",
            key=key,
            value=value,
            overrides={key: None if nullable else _IN_USE.get(key.rpartition(".")[2])},
        )
    return converted + 0.0  # -0.0 is 0.0, also in the fingerprint


def _unquoted(value: Any, otherwise: Any) -> Any:
    """The number that a string spells."""
    try:
        return float(value) if isinstance(value, str) and math.isfinite(float(value)) else otherwise
    except ValueError:
        return otherwise


def ordered_bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """``lower`` <= ``upper``, either of them None for an open side."""
    lower, upper = (number(mapping[side], f"{key}.{side}") for side in ("lower", "upper"))
    if lower is not None and upper is not None and lower > upper:
        raise SpecError(
            f"{key}.lower={lower} > {key}.upper={upper}: nothing lies between. Swap the bounds.",
            key=f"{key}.lower",
            value=lower,
            overrides={f"{key}.lower": upper, f"{key}.upper": lower},
        )
    return lower, upper


def ratio_bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """Bounds on a ratio: positive."""
    for side in ("lower", "upper"):
        bound = number(mapping[side], f"{key}.{side}")
        if bound is not None and bound <= 0:
            raise SpecError(
                f"{key}.{side}={bound}: ratios are positive. Set a bound > 0, or null to leave it open.",
                key=f"{key}.{side}",
                value=bound,
                overrides=usual(mapping, side, key),
            )
    return ordered_bounds(mapping, key)


def usual(mapping: Mapping[str, Any], name: str, key: str) -> dict[str, Any]:
    """A value in use for what is left open or malformed: null beside another bound, else that of a group option.

    Args:
        mapping: what is beside it, of a weight or a mask.

    Returns:
        ``key.name`` -> the value; empty where none is in use.
    """
    full = f"{key}.{name}"
    if name in ("lower", "upper"):
        other = mapping.get("upper" if name == "lower" else "lower")
        if isinstance(other, int | float) and other > 0 and mapping.get("kind") != "clip":
            return {full: None}
        weighs = "kind" in mapping and mapping.get("aggregate") != "geometric"
        lower, upper = band("product" if weighs else str(mapping.get("aggregate", "product")))
        open_below = name == "lower" and mapping.get("kind") == "truncate"
        return {full: None if open_below else lower if name == "lower" else upper}
    if name == "aggregate":
        return {full: "product" if "kind" in mapping else "second_moment" if "budget" in mapping else "geometric"}
    if name == "level":
        return {full: "token" if "kind" in mapping or "budget" in mapping else "sequence"}
    return {full: _IN_USE[name]} if name in _IN_USE else {}


def band(aggregate: str) -> tuple[float | None, float | None]:
    """Bounds in use on an aggregate; None for an open side."""
    return _BANDS.get(aggregate, (None, 0.01 if aggregate.endswith("_mean") else 0.2))


def metric_name(name: str, key: str, mask: Any = None) -> str:
    """A name that can be part of a metric: verl reduces metrics by the substrings "min" and "max".

    Args:
        mask: what has the name, as it was given.
    """
    if not _NAME.fullmatch(name) or "min" in name or "max" in name:
        raise SpecError(
            f"{key}.{name}: a mask's name is lower case letters, digits and _, without 'min' or 'max' "
            f"(verl reduces metrics by those). Rename the mask.",
            key=f"{key}.{name}",
            value=mask,
            overrides={f"{key}.{_renamed(name)}": mask},
            removed=f"{key}.{name}",
        )
    return name


def _renamed(name: str) -> str:
    """The name with what it may not have taken out."""
    plain = re.sub(r"[^a-z0-9_]", "", name.lower().replace("-", "_"))
    while "min" in plain or "max" in plain:
        plain = plain.replace("min", "least").replace("max", "greatest")
    return plain if _NAME.fullmatch(plain) else f"mask_{plain}".rstrip("_")
