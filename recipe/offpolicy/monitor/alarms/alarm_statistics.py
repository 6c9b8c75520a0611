"""The one number per update that each alarm compares with its bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from ...correction import CorrectionSpec
from ...correction.proximal import OF_THE_TRAINER

NAMES: Final = ("ess", "mean_weight", "kept_share", "nonfinite", "mismatch_growth", "opd_overlap")
GROWTH: Final = "mismatch_growth"
RANGES: Final = {
    "ess": (0.0, 1.0),
    "mean_weight": (0.0, math.inf),
    "kept_share": (0.0, 1.0),
    "nonfinite": (0.0, math.inf),
    "mismatch_growth": (0.0, math.inf),
    "opd_overlap": (0.0, 1.0),
}
"""Smallest and largest possible value of each alarm's statistic."""
OF_EXTENSIONS: Final[Mapping[str, tuple[str, str]]] = {"opd_overlap": ("opd", "opd/gap/extreme_share")}
"""Alarm on an extension's metric -> the section that must be on, and the metric; NaN counts as no update."""
_COUNTED: Final = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages")


def find_statistic(name: str, spec: CorrectionSpec) -> str:
    """Return the name of the statistic that an alarm reads: below ``offpolicy/``, or an extension's.

    Without a weight it is the statistic of the ratio that a weight would use: pi_old / mu, or pi / mu if pi_old does
    not come from the trainer's weights and pi_old / mu shows no mismatch.
    """
    trainers_own = spec.proximal in OF_THE_TRAINER
    ratio = "rollout_ratio" if trainers_own else "full_ratio"
    match name:
        case "ess":
            return "weight/ess" if spec.all_weights else f"{ratio}/ess"
        case "mean_weight":
            if not spec.all_weights:
                return f"{ratio}/mean"
            # Self-normalised weights always have mean 1.
            return "raw_weight/mean" if spec.normalized is not None else "weight/mean"
        case "kept_share":
            return "keep/token_share"
        case "nonfinite":
            return "nonfinite"
        case "mismatch_growth":
            return "kl/k3" if trainers_own else f"{ratio}/chi2"
        case _ if name in OF_EXTENSIONS:
            return OF_EXTENSIONS[name][1]
        case _:
            raise ValueError(f"no alarm {name!r}: one of {', '.join(NAMES)}")


def explain_constant(name: str, spec: CorrectionSpec) -> str:
    """Return why an alarm's statistic cannot change under a correction; empty if it can."""
    if name == "kept_share" and not spec.masks and not spec.weight_rejects:
        return "the correction has no mask and no weight that rejects, so everything is kept."
    return ""


def read_value(name: str, spec: CorrectionSpec, values: Mapping[str, float]) -> float:
    """Read an alarm's value from the statistics of an update; NaN if it is missing."""
    if name == "nonfinite":
        found = [values[key] for what in _COUNTED if (key := f"nonfinite/{what}") in values]
        return sum(found) if found else math.nan
    return values.get(find_statistic(name, spec), math.nan)


def compute_growth(past: Sequence[float], value: float, *, history: int, least: float) -> float | None:
    """Compute ``value`` over the median of ``past``; None while fewer than ``history`` values are known.

    Args:
        past: mismatch of the previous updates, finite.
        least: floor of both the value and the median, so that growth from near zero is ignored.
    """
    if math.isnan(value):
        return math.nan
    if len(past) < history:
        return None
    return max(value, least) / max(median(past), least)
