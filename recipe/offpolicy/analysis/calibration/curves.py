"""Kept share by bound, with an interval for the sampled prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .intervals import ClusteredShare, compute_share_interval, estimate_share
from .kept_bounds import compute_needed_radii
from .parts import BoundedPart
from .scores import Scores

Floats = NDArray[np.float64]
_PLACES = 48


@dataclass(frozen=True)
class KeptCurve:
    """Kept share by radius of the moving bound, (K,) each.

    Attributes:
        radius: ascending, in what the part compares.
        share: kept.
        low, high: its interval; NaN where one prompt leaves it unknown.
        count: units that it rests on.
    """

    radius: Floats
    share: Floats
    low: Floats
    high: Floats
    count: int


def choose_radii(part: BoundedPart, scores: Scores) -> Floats:
    """Choose the radii to draw: half by rank, half evenly in log, ascending."""
    radii = compute_needed_radii(part, scores)
    radii = radii[np.isfinite(radii) & (radii > 0)]
    if not len(radii):
        return np.zeros(0)
    # By rank the curve is resolved near 1, evenly in log where it falls.
    by_rank = np.quantile(radii, 1 - np.geomspace(1.0, 1 / (2 * len(radii)), _PLACES // 2))
    even = np.geomspace(max(float(np.quantile(radii, 0.02)), 1e-12), float(radii.max()), _PLACES // 2)
    return np.unique(np.concatenate([by_rank, even]))


def compute_kept_curve(part: BoundedPart, scores: Scores, radius: Floats, confidence: float) -> KeptCurve:
    """Compute the share of the units that the part applies to and keeps, at each ``radius``."""
    radii, scores = compute_needed_radii(part, scores), scores.select(scores.looked)
    found: list[ClusteredShare] = [estimate_share(radii <= place, scores.group) for place in radius]
    ends = np.array([compute_share_interval(share, confidence) for share in found]).reshape(-1, 2)
    return KeptCurve(radius, np.array([share.share for share in found]), ends[:, 0], ends[:, 1], len(scores))
