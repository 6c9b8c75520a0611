"""Converter of ROLL's ``train_infer_correction``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..problem import SpecError
from ..validation import read_number
from .mapping import (
    build_mask,
    build_weight,
    pick_options,
    read_choice,
    read_flag,
    read_options,
    read_ratio_bound,
    refuse,
)

_WEIGHT: Final[dict[str, Any]] = {"enabled": False, "weight_type": "token", "upper_bound": 1.2, "detach": True}
_FILTER: Final[dict[str, Any]] = {
    "enabled": False,
    "agg_type": "token",
    "ratio_enabled": True,
    "ratio_low": 0.8,
    "ratio_high": 1.2,
    "diff_enabled": False,
    "diff_low": -0.2,
    "diff_high": 0.2,
}
_TYPES: Final = ("token", "segment", "geometric", "sequence")
_RATIOS: Final = {
    "token": ("token", "product"),
    "segment": ("turn", "geometric"),
    "geometric": ("sequence", "geometric"),
    "sequence": ("sequence", "product"),
}
"""ROLL's granularity -> our level, and the aggregate of ratios."""
_DIFFERENCES: Final = {
    "token": ("token", "binary_tv"),
    "segment": ("turn", "binary_tv_mean"),
    "geometric": ("sequence", "binary_tv_mean"),
    "sequence": ("sequence", "binary_tv_sum"),
}


def convert_roll(source: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert ROLL's ``train_infer_correction`` and ``enable_old_logprobs_recompute`` to our plain values.

    ``segment`` is the mean over a turn. Without ``enable_old_logprobs_recompute``, ROLL's default, pi_old is the
    current policy. What a filter drops leaves the response mask there, so that KL and denominators lose it as well;
    here it leaves the policy term alone.

    Args:
        source: ROLL's configuration, or an object with its keys as attributes; other keys are not read.

    Raises:
        SpecError: unknown keys of the correction, malformed values, and what has no equivalent here.

    Example:
        >>> convert_roll({"train_infer_correction": {"is_weight": {"enabled": True}}})["weight"]
        {'level': 'token', 'kind': 'truncate', 'lower': None, 'upper': 1.2, 'aggregate': 'product'}
    """
    where = "train_infer_correction"
    defaults = {where: None, "enable_old_logprobs_recompute": False}
    values = pick_options(source, defaults, "roll")
    recompute = read_flag(values, "enable_old_logprobs_recompute", "roll")
    given = values[where] if values[where] is not None else {}
    section = read_options(given, {"is_weight": None, "filters": ()}, where)
    plain: dict[str, Any] = {"proximal": "recompute" if recompute else "reuse", "masks": {}}
    weight = _WEIGHT | read_options(section["is_weight"] or {}, _WEIGHT, f"{where}.is_weight")
    if read_flag(weight, "enabled", f"{where}.is_weight"):
        if not read_flag(weight, "detach", f"{where}.is_weight"):
            raise refuse("weights are detached here.", f"{where}.is_weight.detach", False, "Set it to true.")
        kind = read_choice(weight["weight_type"], _TYPES, f"{where}.is_weight.weight_type", optional=False)
        level, aggregate = _RATIOS[str(kind)]
        upper = read_ratio_bound(weight["upper_bound"], f"{where}.is_weight.upper_bound")
        plain["weight"] = build_weight(level, None, upper, aggregate=aggregate)
    filters = section["filters"]
    if isinstance(filters, Mapping | str):
        raise SpecError("a list of filters.", key=f"{where}.filters", value=filters)
    for place, each in enumerate(filters or ()):
        plain["masks"] |= _convert_filter(each, place, f"{where}.filters[{place}]")
    return plain


def _convert_filter(source: Any, place: int, where: str) -> dict[str, Any]:
    values = read_options(source, _FILTER, where)
    if not read_flag(values, "enabled", where):
        return {}
    kind = str(read_choice(values["agg_type"], _TYPES, f"{where}.agg_type", optional=False))
    masks = {}
    if read_flag(values, "ratio_enabled", where):
        low, high = (read_ratio_bound(values[f"ratio_{side}"], f"{where}.ratio_{side}") for side in ("low", "high"))
        masks[f"ratio_{place}"] = build_mask(*_RATIOS[kind], low, high)
    if read_flag(values, "diff_enabled", where):
        low, high = (read_number(values[f"diff_{side}"], f"{where}.diff_{side}") for side in ("low", "high"))
        masks[f"diff_{place}"] = build_mask(*_DIFFERENCES[kind], low, high)
    return masks
