"""Mismatch shares of updates without fresh tokens, with the backend's part estimated from recent updates."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...correction.statistics import Statistic
from .share_statistics import PARTS, WHOLES, ShareStatistic
from .shares import RECENT, choose_floor, compute_shares
from .sums import SHAPE


class RecentFloor:
    """Sums of the last ``RECENT`` updates, one small table each."""

    def __init__(self) -> None:
        self._tables: deque[NDArray[np.float64]] = deque(maxlen=RECENT)

    def add(self, statistics: Mapping[str, Statistic]) -> None:
        """Add the sums of one update."""
        table = _read_sums(statistics)
        if table is not None:
            self._tables.append(table)

    def compute_shares(self, statistics: Mapping[str, Statistic]) -> dict[str, float]:
        """Compute the values of ``build_share_statistics``; NaN for a share that earlier updates do not identify."""
        table = _read_sums(statistics)
        if table is None:
            return {}
        floor, _ = choose_floor(table, np.sum(self._tables, axis=0) if self._tables else None)
        values = {}
        for whole, split in zip(WHOLES, compute_shares(table, floor), strict=True):
            for part in PARTS:
                share = getattr(split, part)
                values[f"attribution/{whole}_share/{part}"] = math.nan if share is None else float(share)
        return values


def _read_sums(statistics: Mapping[str, Statistic]) -> NDArray[np.float64] | None:
    for statistic in statistics.values():
        if isinstance(statistic, ShareStatistic):
            return np.array([float(part) for part in statistic.parts]).reshape(SHAPE)
    return None
