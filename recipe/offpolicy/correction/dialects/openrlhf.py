"""Converter of OpenRLHF's arguments about the vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .mapping import build_mask, build_weight, pick_options, read_choice, read_flag, read_ratio_bound, refuse

_ADVANTAGE: Final[dict[str, Any]] = {
    "is_correction_enable": False,
    "is_correction_threshold": (0.5, 5.0),
    "is_correction_type": "tis",
}


def convert_openrlhf(source: Mapping[str, Any] | Any, policy_loss_type: str = "ppo") -> dict[str, Any]:
    """Convert OpenRLHF's ``algo.advantage.is_correction_*`` to our plain values.

    ``tis`` clamps token weights to both thresholds, ``icepop`` drops what is outside, ``seq-mask-tis`` drops rows by
    their geometric mean and leaves token weights unbounded.

    Args:
        source: the keys below ``algo.advantage``; others are not read.
        policy_loss_type: OpenRLHF corrects under ``ppo`` alone; under ``gspo`` its own ratio is pi / mu.

    Raises:
        SpecError: malformed values, and a correction that OpenRLHF would not apply.

    Example:
        >>> convert_openrlhf({"is_correction_enable": True})["weight"]
        {'level': 'token', 'kind': 'clip', 'lower': 0.5, 'upper': 5.0}
    """
    where = "algo.advantage"
    values = pick_options(source, _ADVANTAGE, where)
    kinds = ("tis", "icepop", "seq-mask-tis")
    kind = read_choice(values["is_correction_type"], kinds, f"{where}.is_correction_type", optional=False)
    if not read_flag(values, "is_correction_enable", where):
        return {"proximal": "recompute"}
    if policy_loss_type == "gspo":
        # The correction is the ratio itself, pi / mu by row.
        return {"proximal": "bypass"}
    if policy_loss_type != "ppo":
        raise refuse("OpenRLHF corrects under ppo alone.", "policy_loss_type", policy_loss_type, "Set it to ppo.")
    key = f"{where}.is_correction_threshold"
    pair = values["is_correction_threshold"]
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise refuse("a low and a high threshold.", key, pair, f"Set {key}=[0.5,5.0].")
    lower, upper = (read_ratio_bound(bound or None, key) for bound in pair)
    plain: dict[str, Any] = {"proximal": "recompute"}
    if kind == "seq-mask-tis":
        mask = build_mask("sequence", "geometric", lower, upper)
        return plain | {"weight": build_weight("token", None, None), "masks": {"geometric": mask}}
    return plain | {"weight": build_weight("token", lower, upper, reject=kind == "icepop")}
