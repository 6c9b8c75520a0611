"""By how many updates the rollout engine's weights lag, told by the weights that a run has kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

TOLD = 0.5
"""Share of the distance from the present weights that older ones may be from mu, to be told apart from them."""


def find_lag(apart: Sequence[float]) -> int | None:
    """Find by how many updates the engine's weights lag; None where that cannot be told.

    Args:
        apart: mean |log mu - log pi| of a few tokens under the present weights, those before, and so on.
    """
    if not all(map(math.isfinite, apart)):
        return None
    nearest = min(range(len(apart)), key=apart.__getitem__)
    return nearest if nearest == 0 or apart[nearest] <= TOLD * apart[0] else None
