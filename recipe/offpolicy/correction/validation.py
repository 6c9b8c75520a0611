"""Reading plain values, with messages that name the key, the value and the fix.

A mistyped threshold that is taken for a valid one degrades a run in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast, get_args

_MISSING = "???"  # what OmegaConf leaves where a value is mandatory
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class SpecError(ValueError):
    """A correction that cannot be what was meant; the message names key, value and fix."""


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
        raise SpecError(f"{key}.{name}={unknown[name]!r}: unknown key. Known under {key}: {', '.join(sorted(known))}.")


def require_keys(mapping: Mapping[str, Any], required: Iterable[str], key: str, optional: Iterable[str] = ()) -> None:
    """All required keys, with values, and no others than the optional ones."""
    required = set(required)
    known_keys(mapping, required | set(optional), key)
    for name in sorted(required - set(mapping)):
        hint = "null leaves that side open" if name in {"lower", "upper"} else "it has no default"
        raise SpecError(f"{key}.{name} is not set ({hint}). Set {key}.{name}=...")
    for name in sorted(set(mapping)):
        if mapping[name] == _MISSING:
            hint = " OPSM has no published default." if name == "delta" else ""
            raise SpecError(f"{key}.{name} is required and not set.{hint} Set {key}.{name}=...")


def choice(mapping: Mapping[str, Any], name: str, options: Any, key: str, default: str | None = None) -> Any:
    """One of the options of a Literal type."""
    allowed = get_args(options)
    if (value := mapping.get(name, default)) not in allowed:
        raise SpecError(f"{key}.{name}={value!r}: set one of {', '.join(allowed)}.")
    return cast(Any, value)


def truth(mapping: Mapping[str, Any], name: str, key: str) -> bool:
    """True or false; false where it is left out."""
    value = mapping.get(name, False)
    if not isinstance(value, bool):
        raise SpecError(f"{key}.{name}={value!r}: set true or false.")
    return value


def number(value: Any, key: str, *, nullable: bool = True) -> float | None:
    """A finite number or None; ``nullable`` is for messages."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        expected = "a number or null" if nullable else "a number"
        raise SpecError(f"{key}={value!r}: expected {expected}, not {type(value).__name__}. Set {key}=0.5, unquoted.")
    try:
        converted = float(value)
    except OverflowError:  # an integer beyond float64
        converted = math.inf
    if not math.isfinite(converted):
        raise SpecError(f"{key}={value}: expected a finite number. Write null for an open side.")
    return converted + 0.0  # -0.0 is 0.0, also in the fingerprint


def ordered_bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """``lower`` <= ``upper``, either of them None for an open side."""
    lower, upper = (number(mapping[side], f"{key}.{side}") for side in ("lower", "upper"))
    if lower is not None and upper is not None and lower > upper:
        raise SpecError(f"{key}.lower={lower} > {key}.upper={upper}: nothing lies between. Swap the bounds.")
    return lower, upper


def ratio_bounds(mapping: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    """Bounds on a ratio: positive."""
    for side in ("lower", "upper"):
        bound = number(mapping[side], f"{key}.{side}")
        if bound is not None and bound <= 0:
            raise SpecError(f"{key}.{side}={bound}: ratios are positive. Set a bound > 0, or null to leave it open.")
    return ordered_bounds(mapping, key)


def metric_name(name: str, key: str) -> str:
    """A name that can be part of a metric: verl reduces metrics by the substrings "min" and "max"."""
    if not _NAME.fullmatch(name) or "min" in name or "max" in name:
        raise SpecError(
            f"{key}.{name}: a mask's name is lower case letters, digits and _, without 'min' or 'max' "
            f"(verl reduces metrics by those). Rename the mask."
        )
    return name
