"""Converter of SkyRL's ``off_policy_correction``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..problem import SpecError
from .mapping import build_mask, read_choice, read_options, read_ratio_bound

SKYRL_DEFAULTS: Final[dict[str, Any]] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


def convert_skyrl(mapping: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert SkyRL's ``trainer.algorithm.off_policy_correction`` to our plain values.

    SkyRL lets a token mask act before anything that looks at whole sequences; where both are there, ``skyrl_compat``
    reproduces that order. Its outlier mask takes whole rows, so that acting first changes nothing.

    Args:
        mapping: SkyRL's keys, or an object with them as attributes.

    Raises:
        SpecError: unknown keys and malformed values; one token threshold without the other, which SkyRL ignores.

    Example:
        >>> convert_skyrl({"tis_ratio_type": "token"})["weight"]
        {'level': 'token', 'kind': 'truncate', 'lower': None, 'upper': 2.0}
    """
    where = "off_policy_correction"
    values = read_options(mapping, SKYRL_DEFAULTS, where)
    bounds = {
        key: read_ratio_bound(values[key], f"{where}.{key}")
        for key in SKYRL_DEFAULTS
        if "_high" in key or "_low" in key
    }

    def band(stem: str, *, half_open: bool = False) -> tuple[float | None, float | None]:
        low, high = f"{stem}_low", f"{stem}_high"
        lower, upper = bounds[low], bounds[high]
        if not half_open:
            for key, other in ((low, high), (high, low)):
                if bounds[key] is None:
                    raise SpecError(
                        "both are needed; SkyRL leaves a token mask with one of them out, in silence.",
                        f"Set {where}.{key}.",
                        key=f"{where}.{key}",
                        beside={f"{where}.{other}": bounds[other]},
                    )
        if lower is not None and upper is not None and lower > upper:
            raise SpecError(
                "nothing lies between.",
                "Swap them.",
                key=f"{where}.{low}",
                value=lower,
                beside={f"{where}.{high}": upper},
            )
        return lower, upper

    weight: dict[str, Any] | None = None
    level = read_choice(values["tis_ratio_type"], ("token", "sequence"), f"{where}.tis_ratio_type")
    if level is not None:
        cap = f"{level}_tis_ratio_clip_high"
        if bounds[cap] is None:
            raise SpecError(
                "a truncated weight has a cap.",
                "Set it to 2.0 for example.",
                key=f"{where}.{cap}",
                beside={f"{where}.tis_ratio_type": level},
            )
        weight = {"level": level, "kind": "truncate", "lower": None, "upper": bounds[cap]}

    masks: dict[str, Any] = {}
    if _any_set(bounds, "outlier_token_is_threshold"):
        masks["outlier"] = build_mask("sequence", "any", *band("outlier_token_is_threshold", half_open=True))
    if _any_set(bounds, "token_mask_is_threshold"):
        masks["token"] = build_mask("token", "product", *band("token_mask_is_threshold"))
    metric = read_choice(values["sequence_mask_metric"], ("geometric", "product"), f"{where}.sequence_mask_metric")
    if metric is not None:
        stem = "geo_mask" if metric == "geometric" else "product_mask"
        masks[metric] = build_mask("sequence", metric, *band(stem))
    by_sequence = metric is not None or level == "sequence"
    return {"weight": weight, "masks": masks, "skyrl_compat": "token" in masks and by_sequence}


def _any_set(bounds: Mapping[str, float | None], stem: str) -> bool:
    return bounds[f"{stem}_low"] is not None or bounds[f"{stem}_high"] is not None
