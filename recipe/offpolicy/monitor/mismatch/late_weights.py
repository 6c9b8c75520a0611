"""Weights that reach the rollout engine late, told by the mismatch: verl's versions cannot see them.

At a run's first update trainer and engine hold the same weights, however late later ones come, so that its mismatch is
that of two engines. Where rows that verl calls fresh differ by many times that a few updates on, the engine has not got
the weights that the trainer sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

logger = logging.getLogger("verl.offpolicy")

UPDATES = 8
"""Of a run that are watched: later on a mismatch grows for other reasons as well."""
FACTOR, LEAST = 20.0, 5e-3
"""Times the first update's k3, and nats a token, from which an update counts."""
IN_A_ROW = 2
TOLD = 0.5
"""Share of the distance from the present weights that older ones may be from mu, to be told apart from them."""


class LateWeightsWatch:
    """Watch of a run's first updates, which warns once."""

    def __init__(self) -> None:
        self._first = math.nan
        self._updates = self._raised = 0

    def see(self, values: Mapping[str, float]) -> bool:
        """Look at the statistics of an update, below ``offpolicy/``; True if it warned.

        Updates of rows that verl itself calls stale, and those without a pi_old of the trainer's own, say nothing.
        """
        k3 = values.get("kl/k3", math.nan)
        stale = values.get("staleness/max", 0.0) > 0
        if self._updates >= UPDATES or not math.isfinite(k3) or stale:
            return False
        self._updates += 1
        if self._updates == 1:
            self._first = k3
            return False
        self._raised = self._raised + 1 if k3 > max(FACTOR * self._first, LEAST) else 0
        if self._raised != IN_A_ROW:
            return False
        self._updates = UPDATES
        logger.warning(
            "the rollout engine's weights lag: mu and pi_old differ by k3 = %.2g nats a token, and by %.2g at the "
            "first update, when both held the same weights; verl's versions say that the rows are fresh. "
            "offpolicy.late_weights.snapshots=8 says by how many updates.",
            *(k3, self._first),
        )
        return True


def find_lag(apart: Sequence[float]) -> int | None:
    """Find by how many updates the engine's weights lag; None where that cannot be told.

    Args:
        apart: mean |log mu - log pi| of a few tokens under the present weights, those before, and so on.
    """
    if not all(map(math.isfinite, apart)):
        return None
    nearest = min(range(len(apart)), key=apart.__getitem__)
    return nearest if nearest == 0 or apart[nearest] <= TOLD * apart[0] else None
