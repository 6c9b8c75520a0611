"""Test for a statistic whose spread depends on the length of a row, so that one bound treats lengths differently.

Zero-mean noise averages out in a mean over T tokens, whose spread falls as T^-1/2, and adds up in their sum, whose
spread grows as T^1/2: a bound on a geometric mean then rejects short rows, one on a product long rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ...correction.catalogue import BUCKETS
from .intervals import Interval
from .scores import Scores

LEAST_ROWS = 20
"""Rows that a bucket needs to enter the test."""


@dataclass(frozen=True)
class LengthTest:
    """Spearman's rank correlation of a row's distance with its length.

    Attributes:
        correlation: of the distance named by ``measure``; NaN where there is nothing to compare.
        interval: its interval, from the variance over prompt groups.
        measure: ``size``, the distance from no mismatch, or ``spread``, from the median of rows of like length.
        exponent: a in distance ~ T^a, by least squares on logs; -0.5 for noise in a mean, 0.5 in a sum.
        rows: that were compared.
    """

    correlation: float
    interval: Interval
    measure: str
    exponent: float
    rows: int

    @property
    def depends(self) -> bool:
        """True if the interval excludes 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


def find_length_bucket(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find the index into ``BUCKETS`` of each T >= 1, (U,), as the metrics of ``offpolicy/length/`` do."""
    edges = [most for most in BUCKETS.values() if most is not None]
    return np.searchsorted(np.asarray(edges), length, side="left")


def measure_length_dependence(scores: Scores, confidence: float) -> LengthTest:
    """Test size and spread against length at half of the error each (Bonferroni); return the clearer one.

    What is decided by token or turn is averaged over its row first, so that a row counts once.
    """
    # The two tests see different faults: a shift of the mean, and a change of the scatter around it.
    size, row_length, group = _by_row(np.maximum(np.abs(scores.low), np.abs(scores.high)), scores)
    middle = (scores.low + scores.high) / 2
    spread, _, _ = _by_row(np.abs(middle - _bucket_medians(middle, scores.length)), scores)
    counts = np.bincount(find_length_bucket(row_length), minlength=len(BUCKETS))
    enough = counts[find_length_bucket(row_length)] >= LEAST_ROWS
    tests = [
        _rank_test(name, distance[enough], row_length[enough], group[enough], (1 + confidence) / 2)
        for name, distance in (("size", size), ("spread", spread))
    ]
    return max(tests, key=lambda test: (test.depends, abs(test.correlation) if test.rows else 0.0))


def _rank_test(
    name: str, distance: NDArray[np.float64], length: NDArray[np.int64], group: NDArray[np.int64], confidence: float
) -> LengthTest:
    """Compute the rank correlation of a distance with length, its interval over prompt groups, and the exponent."""
    rows = len(distance)
    x, y = _ranks(length.astype(np.float64)), _ranks(distance)
    groups = len(np.unique(group))
    if rows < 3 or groups < 3 or not x.any() or not y.any():
        return LengthTest(math.nan, (math.nan, math.nan), name, math.nan, rows)
    x, y = x / math.sqrt(x @ x), y / math.sqrt(y @ y)
    correlation = float(x @ y)
    # The variance of a correlation by its influence function, summed within groups.
    influence = x * y - correlation / 2 * (x * x + y * y)
    totals = np.bincount(group, weights=influence)
    half = _normal(confidence) * math.sqrt(groups / (groups - 1) * float(totals @ totals))
    # The exponent is fitted in logs, where a distance of 0 has no value.
    apart = distance > 0
    log_t, log_d = np.log(length[apart]), np.log(distance[apart])
    log_t = log_t - log_t.mean() if len(log_t) else log_t
    exponent = float(log_t @ log_d / (log_t @ log_t)) if log_t.any() else math.nan
    return LengthTest(correlation, (correlation - half, correlation + half), name, exponent, rows)


def _by_row(
    values: NDArray[np.float64], scores: Scores
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Compute the mean of ``values`` over each row's units, its length, and its group."""
    _, first, index, counts = np.unique(scores.row, return_index=True, return_inverse=True, return_counts=True)
    return np.bincount(index, weights=values) / counts, scores.length[first], scores.group[first]


def _bucket_medians(values: NDArray[np.float64], length: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute the median over each unit's length bucket, (U,)."""
    bucket = find_length_bucket(length)
    medians = np.zeros(len(BUCKETS))
    for index in np.unique(bucket):
        medians[index] = np.median(values[bucket == index])
    return medians[bucket]


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute centred ranks; equal values share one."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks = (last - (counts - 1) / 2)[index] if len(values) else values
    return ranks - ranks.mean() if len(values) else ranks


def _normal(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)
