"""Shares of updates without fresh tokens: the backend as the updates shortly before have shown it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...correction.statistics import Statistic
from .shares import RECENT, choose_floor, shares
from .statistics import PARTS, WHOLES, ShareStatistic
from .sums import SHAPE


class RecentFloor:
    """Remembers the sums of the last ``RECENT`` updates; what is kept is one small table each."""

    def __init__(self) -> None:
        self._tables: deque[NDArray[np.float64]] = deque(maxlen=RECENT)

    def take(self, statistics: Mapping[str, Statistic]) -> None:
        """Remember one update."""
        table = _table(statistics)
        if table is not None:
            self._tables.append(table)

    def shares(self, statistics: Mapping[str, Statistic]) -> dict[str, float]:
        """The values of ``statistics.share_statistics``, NaN where not even earlier updates identify one."""
        table = _table(statistics)
        if table is None:
            return {}
        floor, _ = choose_floor(table, np.sum(self._tables, axis=0) if self._tables else None)
        values = {}
        for whole, split in zip(WHOLES, shares(table, floor), strict=True):
            for part in PARTS:
                share = getattr(split, part)
                values[f"attribution/{whole}_share/{part}"] = math.nan if share is None else float(share)
        return values


def _table(statistics: Mapping[str, Statistic]) -> NDArray[np.float64] | None:
    for statistic in statistics.values():
        if isinstance(statistic, ShareStatistic):
            return np.array([float(part) for part in statistic.parts]).reshape(SHAPE)
    return None
