"""Bounds as text, and bounds that move from update to update.

Everything else in a spec is its structure. In the structure's fingerprint, a marker replaces each moving bound, so the
fingerprint stays the same for a whole run. The bounds themselves are sent with each update.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from . import CorrectionSpec, MaskSpec, WeightSpec

NOT_SET = "not set"
_DIGITS = 6


def format_bounds(bounds: Mapping[str, float | None]) -> str:
    """Format the bounds of a mask or a weight.

    Args:
        bounds: the bounds that exist among ``lower``, ``upper``, ``delta`` and ``budget``; None is an open side.
            ``delta`` and ``budget`` replace lower and upper, and are shown alone.

    Returns:
        The text; ``not set`` if no bound has a value.

    Example:
        >>> format_bounds({"lower": 0.99, "upper": 1.01}), format_bounds({"lower": None, "upper": 2.0})
        ('[0.99, 1.01]', '<= 2')
        >>> format_bounds({"lower": 0.904837, "upper": None, "delta": 0.1})
        'delta=0.1'
    """
    for name in ("delta", "budget"):
        if (value := bounds.get(name)) is not None:
            return f"{name}={_format_number(value)}"
    lower, upper = bounds.get("lower"), bounds.get("upper")
    if lower is not None and upper is not None:
        return f"[{_format_number(lower)}, {_format_number(upper)}]"
    if upper is not None:
        return f"<= {_format_number(upper)}"
    return NOT_SET if lower is None else f">= {_format_number(lower)}"


def _format_number(value: float) -> str:
    """Format a number with six digits, or with more if it is close to 1 and would otherwise be shown as 1."""
    texts = (f"{value:.{digits}g}" for digits in range(_DIGITS, 18))
    return next(text for text in texts if (float(text) == 1) == (value == 1))


Bounds = Mapping[str, float | None]
"""Maps each bound key of a part to its value: ``lower`` and ``upper``, or ``delta``; a weight has only ``upper``."""
Side = Literal["both", "upper", "lower"]
"""Which of a part's bounds move."""
WEIGHT: Final = "correction.weight"
"""Name that stands for the weight in a list of mask names, which never contain a dot."""
MOVES = "moves"
"""Placeholder for a moving bound in the structure; an open side stays null."""


def read_bounds(spec: CorrectionSpec, names: Collection[str]) -> dict[str, dict[str, float | None]]:
    """Read the bounds of those masks in ``names`` that the spec contains, and likewise the weight's cap as ``WEIGHT``.

    Example:
        >>> from .weights import WeightSpec
        >>> tis = CorrectionSpec(weight=WeightSpec("token", "truncate", None, 2.0))
        >>> read_bounds(tis, [WEIGHT])[WEIGHT]
        {'upper': 2.0}
    """
    found = {name: _bounds(mask.to_mapping()) for name, mask in spec.masks if name in names}
    if spec.weight is not None and WEIGHT in names:
        found[WEIGHT] = {"upper": spec.weight.upper}
    return found


def replace_bounds(spec: CorrectionSpec, bounds: Mapping[str, Bounds]) -> CorrectionSpec:
    """Build a copy of the spec with these bounds, keyed by mask name; ``WEIGHT`` stands for the weight.

    Raises:
        KeyError: the spec has no such part.
        SpecError: a part cannot have these bounds.

    Example:
        >>> from .weights import WeightSpec
        >>> tis = CorrectionSpec(weight=WeightSpec("token", "truncate", None, 2.0))
        >>> replace_bounds(tis, {WEIGHT: {"upper": 3.0}}).weight.upper
        3.0
    """
    there = {name for name, _ in spec.masks} | (set() if spec.weight is None else {WEIGHT})
    if unknown := set(bounds) - there:
        raise KeyError(f"bounds were given for {', '.join(sorted(unknown))}, but the correction has no such part")
    masks = tuple((name, _moved(name, mask, bounds[name]) if name in bounds else mask) for name, mask in spec.masks)
    weight = spec.weight
    if weight is not None and WEIGHT in bounds:
        weight = WeightSpec.from_mapping(weight.to_mapping() | dict(bounds[WEIGHT]))
    return spec if (weight, masks) == (spec.weight, spec.masks) else replace(spec, weight=weight, masks=masks)


def compute_fingerprint(spec: CorrectionSpec, names: Collection[str]) -> int:
    """Compute ``CorrectionSpec.fingerprint`` without the moving bounds of the parts in ``names``.

    Example:
        >>> from .weights import WeightSpec
        >>> narrow, wide = (CorrectionSpec(weight=WeightSpec("token", "truncate", None, cap)) for cap in (2.0, 3.0))
        >>> compute_fingerprint(narrow, [WEIGHT]) == compute_fingerprint(wide, [WEIGHT])
        True
        >>> compute_fingerprint(narrow, []) == compute_fingerprint(wide, [])
        False
    """
    if not names:
        return spec.fingerprint()
    mapping = spec.to_mapping()
    for name in names:
        if name == WEIGHT:
            mapping["weight"]["upper"] = MOVES
            continue
        mask = mapping["masks"][name]
        mask.update({key: MOVES for key, value in _bounds(mask).items() if value is not None})
    text = json.dumps(mapping, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def format_part_path(name: str) -> str:
    """Format the path of a weight or mask under ``correction``.

    Example:
        >>> format_part_path("gsm"), format_part_path(WEIGHT)
        ('masks.gsm', 'weight')
    """
    return "weight" if name == WEIGHT else f"masks.{name}"


def _bounds(mapping: Mapping[str, Any]) -> dict[str, float | None]:
    return {key: mapping[key] for key in ("lower", "upper", "delta") if key in mapping}


def _moved(name: str, mask: MaskSpec, bounds: Bounds) -> MaskSpec:
    return MaskSpec.from_mapping(mask.to_mapping() | dict(bounds), key=f"correction.masks.{name}")
