"""How the kept share rises as a bound moves out, with a band for the prompts that happened to be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .intervals import Clustered, clustered, share_interval
from .parts import Part
from .scores import Scores
from .thresholds import needed

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


def places(part: Part, scores: Scores) -> Floats:
    """Radii at which a curve of these units is worth drawing: half by rank, half evenly in log, ascending."""
    radii = needed(part, scores)
    radii = radii[np.isfinite(radii) & (radii > 0)]
    if not len(radii):
        return np.zeros(0)
    by_rank = np.quantile(radii, 1 - np.geomspace(1.0, 1 / (2 * len(radii)), _PLACES // 2))
    even = np.geomspace(max(float(np.quantile(radii, 0.02)), 1e-12), float(radii.max()), _PLACES // 2)
    return np.unique(np.concatenate([by_rank, even]))


def kept_curve(part: Part, scores: Scores, radius: Floats, confidence: float) -> KeptCurve:
    """The kept share, at each ``radius``, of those of these units that the part looks at."""
    radii, scores = needed(part, scores), scores.chosen(scores.looked)
    found: list[Clustered] = [clustered(radii <= place, scores.group) for place in radius]
    ends = np.array([share_interval(share, confidence) for share in found]).reshape(-1, 2)
    return KeptCurve(radius, np.array([share.share for share in found]), ends[:, 0], ends[:, 1], len(scores))
