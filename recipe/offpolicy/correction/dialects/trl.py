"""Converter of the fields of TRL's ``GRPOConfig`` about the sampling engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..problem import SpecError
from ..ratios import EXP_CLAMP
from ..validation import read_bool, read_number
from .mapping import read_choice, read_options, read_ratio_bound

TRL_DEFAULTS: Final[dict[str, Any]] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "off_policy_mask_threshold": None,
}
_TRL_MODES: Final = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def convert_trl(mapping: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert the fields of TRL's ``GRPOConfig`` about the sampling engine to our plain values.

    TRL's ``*_mask`` modes leave the ratio as a weight inside the bounds. ``off_policy_mask_threshold`` is off-policy
    sequence masking on pi / mu with the sign of the row's advantage. TRL uses the first four keys with
    ``use_vllm=True`` alone, and clamps no log-ratio.

    Args:
        mapping: the five keys, or an object with them as attributes; its others are not read.

    Raises:
        SpecError: unknown keys and malformed values, and bounds that no weight can reach.

    Example:
        >>> convert_trl({})["weight"]  # TRL's defaults
        {'level': 'sequence', 'kind': 'reject', 'lower': None, 'upper': 3.0}
    """
    where, stem = "GRPOConfig", "vllm_importance_sampling"
    values = read_options(mapping, TRL_DEFAULTS, where)
    key = f"{where}.{stem}"
    lower, upper = (read_ratio_bound(values[f"{stem}_clip_{side}"], f"{key}_clip_{side}") for side in ("min", "max"))
    mode = read_choice(values[f"{stem}_mode"], _TRL_MODES, f"{key}_mode", optional=False)
    if lower is not None and upper is not None and lower > upper:
        beside = {f"{key}_clip_max": upper}
        raise SpecError("nothing lies between.", "Swap them.", key=f"{key}_clip_min", value=lower, beside=beside)
    weight: dict[str, Any] | None = None
    if read_bool(values, f"{stem}_correction", where):
        if lower is None and upper is None:
            raise SpecError(
                f"{mode} has nothing to bind.",
                f"Set {key}_clip_max=3.0, or {key}_correction=false.",
                key=f"{key}_clip_max",
                beside={f"{key}_clip_min": None},
            )
        level, action = str(mode).split("_")
        kind = "reject" if action == "mask" else "clip" if lower is not None and upper is not None else "truncate"
        weight = {"level": level, "kind": kind, "lower": lower, "upper": upper}
    masks: dict[str, Any] = {}
    key = f"{where}.off_policy_mask_threshold"
    threshold = read_number(values["off_policy_mask_threshold"], key)
    if threshold is not None:
        if not 0 <= threshold <= EXP_CLAMP:
            raise SpecError(
                f"mean log(mu/pi) in nats a token, between 0 and {EXP_CLAMP:g}.",
                f"Set {key}=0.5, or null for no mask.",
                key=key,
                value=threshold,
            )
        opsm = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": threshold, "when": "negative"}
        masks["opsm"] = opsm
    return {"weight": weight, "masks": masks}
