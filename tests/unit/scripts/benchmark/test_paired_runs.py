"""Pairs of whole runs: their figures by hand, and commands that stand in for the runs."""

from __future__ import annotations

import math

import pytest

from scripts.benchmark.paired_runs import Run, compute_interval, format_result

pytest.importorskip("verl")


def ended(start: float, *seconds: float) -> Run:
    return Run(start, [99.0, *seconds], {})


def test_an_interval_by_hand() -> None:
    """Of 1, 2 and 6: mean 3, standard deviation sqrt(7), t of 2 degrees of freedom 4.303."""
    half = 4.303 * math.sqrt(7.0) / math.sqrt(3.0)
    assert compute_interval([1.0, 2.0, 6.0]) == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    mean, low, _ = compute_interval([4.0])
    assert mean == 4.0
    assert math.isnan(low)
    mean, _, high = compute_interval([0.0, 2.0] * 50)
    assert high - mean == pytest.approx(2.086 * math.sqrt(100 / 99) / 10)


def test_pairs_are_compared_by_hand() -> None:
    """Ratios 1/2 and 2, whose geometric mean is 1; starts 4 and 2 s apart; first steps do not count."""
    pairs = [
        (ended(30.0, 2.0, 2.0), ended(34.0, 1.0, 1.0)),
        (ended(30.0, 2.0, 2.0), ended(32.0, 4.0, 2.0, 9.0)),
    ]
    first, _, *rows, ratio, start = format_result(pairs).splitlines()
    assert first.startswith("| pair |")
    assert rows == ["| 1 | 2.000 | 1.000 | 0.500 | 30.0 | 34.0 |", "| 2 | 2.000 | 4.000 | 2.000 | 30.0 | 32.0 |"]
    # Two logs, +-log 2: a standard error of log 2, and 12.706 of them.
    assert ratio.endswith(f": 1.000 (0.000 to {2**12.706:.3f})")
    assert start.endswith(": +3.0 s (-9.7 to +15.7)")
