"""Converter of open-instruct's ``GRPOExperimentConfig`` fields about rho."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..validation import read_number
from .mapping import build_mask, build_weight, pick_options, read_flag, read_ratio_bound

_FIELDS: Final[dict[str, Any]] = {
    "use_rho_correction": True,
    "rho_clamp_lower_bound": 0.0,
    "rho_clamp_upper_bound": 2.0,
    "rho_mask_lower_bound": 0.0,
    "rho_mask_upper_bound": 0.0,
    "rho_mask_sequence_level": False,
    "rho_mask_tv_divergence": False,
    "use_vllm_logprobs": False,
}


def convert_open_instruct(source: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert open-instruct's ``rho_*`` fields to our plain values; a bound of 0 is none.

    rho is clamped as a weight, and what lies outside the mask's bounds is dropped; with ``rho_mask_sequence_level``
    both go by the row's geometric mean. With ``rho_mask_tv_divergence`` (VACO) the bounds are on the row's mean of
    |rho - 1|, twice what ``tv_mean`` is here, and tokens that lead back stay. Log-ratios are clamped to +-10 there and
    to +-20 here. With ``use_vllm_logprobs`` pi_old is mu, and nothing is corrected.

    Args:
        source: the fields, or an object with them as attributes; others are not read.

    Raises:
        SpecError: malformed values.

    Example:
        >>> convert_open_instruct({})["weight"]
        {'level': 'token', 'kind': 'truncate', 'lower': None, 'upper': 2.0, 'aggregate': 'product'}
    """
    where = "open_instruct"
    values = pick_options(source, _FIELDS, where, ("rho_", "rollout_importance_", "policy_ratio_"))
    if read_flag(values, "use_vllm_logprobs", where):
        return {"proximal": "bypass"}
    if not read_flag(values, "use_rho_correction", where):
        return {"proximal": "recompute"}
    by_row = read_flag(values, "rho_mask_sequence_level", where)
    level, aggregate = ("sequence", "geometric") if by_row else ("token", "product")
    clamp = [read_ratio_bound(values[key] or None, f"{where}.{key}") for key in _name("clamp")]
    plain: dict[str, Any] = {"proximal": "recompute", "masks": {}}
    plain["weight"] = build_weight(level, *clamp, aggregate=aggregate)
    if read_flag(values, "rho_mask_tv_divergence", where):
        given = (read_number(values[key] or None, f"{where}.{key}") for key in _name("mask"))
        low, high = (None if bound is None else bound / 2 for bound in given)
        if low is not None or high is not None:
            mask = build_mask("sequence", "tv_mean", low, high)
            plain["masks"]["vaco"] = mask | {"when": "outward", "sign": "token"}
        return plain
    low, high = (read_ratio_bound(values[key] or None, f"{where}.{key}") for key in _name("mask"))
    if low is not None or high is not None:
        # A band on tokens with one side open is one on each by itself.
        how = "any" if level == "token" and None in (low, high) else aggregate
        plain["masks"]["rho"] = build_mask(level, how, low, high)
    return plain


def _name(action: str) -> tuple[str, str]:
    return f"rho_{action}_lower_bound", f"rho_{action}_upper_bound"
