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
_IN_USE = {"delta": 0.1, "budget": 0.04, "kind": "truncate", "ratio": "rollout", "when": "any"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class SpecError(ValueError):
    """A correction that cannot be what was meant; the message names key, value and fix.

    Attributes:
        key, value: as they were given; an empty key where the message alone tells.
        overrides: key -> the value that mends it; empty where none is known.
        removed: a key that is to be taken away before; "" for none.
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
        raise SpecError(f"{key}={shown}: expected a mapping. Choose it by a group option, e.g. correction=gsm.")
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
            overrides={f"{key}.{near[0]}": value} if near else None,
            removed=f"{key}.{name}",
        )


def require_keys(mapping: Mapping[str, Any], required: Iterable[str], key: str, optional: Iterable[str] = ()) -> None:
    """All required keys, with values, and no others than the optional ones."""
    required = set(required)
    known_keys(mapping, required | set(optional), key)
    for name in sorted(required - set(mapping)):
        hint = "null leaves that side open" if name in {"lower", "upper"} else "it has no default"
        raise SpecError(
            f"{key}.{name} is not set ({hint}). Set {key}.{name}=...",
            key=f"{key}.{name}",
            overrides=_usual(mapping, name, key),
        )
    for name in sorted(set(mapping)):
        if mapping[name] == _MISSING:
            hint = " OPSM has no published default." if name == "delta" else ""
            raise SpecError(
                f"{key}.{name} is required and not set.{hint} Set {key}.{name}=...",
                key=f"{key}.{name}",
                overrides=_usual(mapping, name, key),
            )


def choice(mapping: Mapping[str, Any], name: str, options: Any, key: str, default: str | None = None) -> Any:
    """One of the options of a Literal type."""
    allowed = get_args(options)
    if (value := mapping.get(name, default)) not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1) or ([] if default is None else [default])
        raise SpecError(
            f"{key}.{name}={value!r}: set one of {', '.join(allowed)}.",
            key=f"{key}.{name}",
            value=value,
            overrides={f"{key}.{name}": near[0]} if near else None,
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
            overrides=_quoted_number(value, key),
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
            overrides={key: None} if nullable else None,
        )
    return converted + 0.0  # -0.0 is 0.0, also in the fingerprint


def _quoted_number(value: Any, key: str) -> dict[str, Any]:
    try:
        return {key: float(value)} if isinstance(value, str) and math.isfinite(float(value)) else {}
    except ValueError:
        return {}


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
                overrides=_usual(mapping, side, key),
            )
    return ordered_bounds(mapping, key)


def _usual(mapping: Mapping[str, Any], name: str, key: str) -> dict[str, Any]:
    """A value in use for what is left open: null beside another bound, and the bounds of the options of the group."""
    if name in ("lower", "upper"):
        other = mapping.get("upper" if name == "lower" else "lower")
        if isinstance(other, int | float) and other > 0:
            return {f"{key}.{name}": None}
        geometric = mapping.get("aggregate") == "geometric"
        lower, upper = (0.99, 1.01) if geometric else (0.5, 2.0)
        open_below = name == "lower" and mapping.get("kind") == "truncate"
        return {f"{key}.{name}": None if open_below else lower if name == "lower" else upper}
    return {f"{key}.{name}": _IN_USE[name]} if name in _IN_USE else {}


def metric_name(name: str, key: str) -> str:
    """A name that can be part of a metric: verl reduces metrics by the substrings "min" and "max"."""
    if not _NAME.fullmatch(name) or "min" in name or "max" in name:
        raise SpecError(
            f"{key}.{name}: a mask's name is lower case letters, digits and _, without 'min' or 'max' "
            f"(verl reduces metrics by those). Rename the mask."
        )
    return name
