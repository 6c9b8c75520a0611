"""The number of updates by which the rollout engine's weights lag, from the weights that a run has kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

TOLD = 0.5
"""Largest distance of older weights from mu, as a share of the current weights' distance, that identifies a lag."""


def find_lag(apart: Sequence[float]) -> int | None:
    """Find the number of updates by which the engine's weights lag; None if it cannot be identified.

    Args:
        apart: mean |log mu - log pi| of a few tokens under the current weights, the previous ones, and so on.
    """
    if not all(map(math.isfinite, apart)):
        return None
    nearest = min(range(len(apart)), key=apart.__getitem__)
    return nearest if nearest == 0 or apart[nearest] <= TOLD * apart[0] else None
