"""Checks of the values of an extension's section: which keys there are, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..correction import SpecError
from ..correction.spelling import find_closest

Rule = tuple[Callable[[Any], bool], str, Any]
"""Returns True of values that fit; these in words; the value that mends another."""


def check_keys(section: str, values: Any, known: Mapping[str, Rule]) -> dict[str, Any]:
    """Return the values of a section after checking them.

    Raises:
        SpecError: an unknown key, or a value that does not fit.
    """
    if not isinstance(values, Mapping):
        raise SpecError("not a mapping.", f"Set {section}.KEY=VALUE.", key=section, value=values)
    for name, value in values.items():
        key = f"{section}.{name}"
        if name not in known:
            near = find_closest(str(name), known)
            fix = f"Did you mean {section}.{near}?" if near else f"Known under {section}: {', '.join(known)}."
            meant, away = ({f"{section}.{near}": value}, {key: value}) if near else (None, None)
            raise SpecError("unknown key.", fix, key=key, value=value, meant=meant, removed=away)
        fits, wanted, default = known[name]
        if not fits(value):
            raise SpecError(f"expected {wanted}.", key=key, value=value, mend={key: default})
    return dict(values)


def is_number(value: object) -> bool:
    """Return True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object, least: int = 1) -> bool:
    """Return True for a whole number that is not below ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: object) -> bool:
    """Return True for a finite number above 0."""
    return is_number(value) and value > 0  # type: ignore[operator]


def is_flag(value: object) -> bool:
    """Return True for true and false."""
    return isinstance(value, bool)


def optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Let null fit too."""
    return lambda value: value is None or fits(value)
