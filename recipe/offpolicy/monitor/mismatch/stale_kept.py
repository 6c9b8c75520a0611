"""Warns if a correction keeps almost none of the tokens that older weights sampled."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from ...correction import recommended

logger = logging.getLogger("verl.offpolicy")

LEAST_KEPT = 0.1
LEAST_TOKENS = 100
"""Minimum number of stale tokens in an update for the check to apply."""
IN_A_ROW = 2
_AGES = ("is1", "is2", "ge3")


class StaleRowsWatch:
    """Checks every update, and warns at most once."""

    def __init__(self) -> None:
        self._low = 0

    def see(self, values: Mapping[str, float]) -> bool:
        """Check the statistics of an update, under ``offpolicy/``; return True if a warning was issued."""
        counts = [values.get(f"staleness/{age}/token_count", 0.0) for age in _AGES]
        shares = [values.get(f"staleness/{age}/keep_token_share", math.nan) for age in _AGES]
        stale = sum(counts)
        if self._low >= IN_A_ROW or not stale >= LEAST_TOKENS:
            return False
        kept = sum(count * share for count, share in zip(counts, shares, strict=True) if count) / stale
        self._low = self._low + 1 if kept < LEAST_KEPT else 0
        if self._low != IN_A_ROW:
            return False
        logger.warning(
            "the correction keeps %.3f of the tokens that older weights sampled, %d in this update: bounds made for "
            "two engines at equal weights reject stale sequences. Use %s instead, or calibrate the bounds on a "
            "recording.",
            *(kept, stale, recommended.LINE),
        )
        return True
