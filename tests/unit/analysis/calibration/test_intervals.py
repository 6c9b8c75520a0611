"""Intervals for rows in prompt groups: hand-worked cases, and coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.floor import (
    compute_least_count,
    compute_quantile_interval,
    compute_share_interval,
    estimate_share,
    resample_totals,
)


def test_design_effect_of_groups_that_agree() -> None:
    """3 groups of 4 alike, kept 4, 4, 0: share 2/3; residuals 4 - 2/3 4 = 4/3, 4/3, -8/3, sum of squares 96/9.

    Variance of the share = 3/2 (96/9) / 144 = 1/9; independent (2/3)(1/3)/12 = 1/54; effect 6, effective 12/6 = 2.
    """
    found = estimate_share(np.repeat([True, True, False], 4), np.repeat([0, 1, 2], 4))
    assert (found.count, found.groups) == (12, 3)
    assert found.share == pytest.approx(2 / 3)
    assert found.effective == pytest.approx(2.0)


def test_groups_of_one_are_independent() -> None:
    """10 groups of 1, 5 kept: 10/9 of the binomial variance, 10/9 (10/4)/100 = 1/36 against 1/40; effective 9."""
    found = estimate_share(np.arange(10) < 5, np.arange(10))
    assert found.effective == pytest.approx(9.0)


def test_balanced_groups_count_as_independent_at_most() -> None:
    """Each group keeps one of two: no variance between groups, which is chance and not knowledge."""
    found = estimate_share(np.tile([True, False], 8), np.repeat(np.arange(8), 2))
    assert found.effective == 16


def test_nothing_rejected_takes_groups_as_units() -> None:
    """No variance to measure: the worst is assumed, siblings alike, 4 groups of 3 say as much as 4 rows."""
    found = estimate_share(np.ones(12, dtype=bool), np.repeat(np.arange(4), 3))
    assert found.effective == pytest.approx(4.0)


def test_one_group_says_nothing_of_others() -> None:
    found = estimate_share(np.arange(6) < 3, np.zeros(6, dtype=np.int64))
    assert math.isnan(found.effective)
    assert all(math.isnan(end) for end in compute_share_interval(found, 0.95))


def test_median_of_ten() -> None:
    """Bin(10, 1/2): P(B < 2) = 11/1024 = 0.0107 <= 0.025 < P(B < 3) = 0.0547, so [x(2), x(9)], coverage 0.979."""
    assert compute_quantile_interval(np.arange(1.0, 11), 0.5, 10, 0.95) == (2.0, 9.0)


def test_too_few_for_an_upper_end() -> None:
    """0.9^21 = 0.109 > 0.025: no order statistic of 21 bounds the 0.9-quantile; 0.9^36 = 0.0225 is the first."""
    assert compute_quantile_interval(np.arange(21.0), 0.9, 21, 0.95)[1] == math.inf
    assert compute_quantile_interval(np.arange(35.0), 0.9, 35, 0.95)[1] == math.inf
    assert compute_quantile_interval(np.arange(36.0), 0.9, 36, 0.95)[1] == 35.0


def test_one_sided_end() -> None:
    """0.99^298 = 0.0500 > 0.05 >= 0.99^299: the 0.99-quantile takes 299 units."""
    assert compute_least_count(0.99, 0.95) == 299
    assert compute_quantile_interval(np.arange(298.0), 0.99, 298, 0.95, one_sided=True) == (-math.inf, math.inf)
    assert compute_quantile_interval(np.arange(299.0), 0.99, 299, 0.95, one_sided=True) == (-math.inf, 298.0)


def test_large_counts_agree_with_the_normal_law() -> None:
    """10^7 units at 0.98: ranks 0.98 n +- 1.96 sqrt(n 0.98 0.02) = 9.8e6 +- 867.7."""
    ordered = np.arange(10_000_000.0)
    low, high = compute_quantile_interval(ordered, 0.98, 10_000_000, 0.95)
    assert low == pytest.approx(9_800_000 - 867.7, abs=3)
    assert high == pytest.approx(9_800_000 + 867.7, abs=3)


def test_wilson() -> None:
    """8 of 10 kept, independent up to 10/9: n = 9, z = 1.96, z^2/n = 0.42684.

    Middle (0.8 + 0.21342) / 1.42684 = 0.71026, half sqrt(0.42684 (0.16 + 0.10671)) / 1.42684 = 0.23647.
    """
    low, high = compute_share_interval(estimate_share(np.arange(10) < 8, np.arange(10)), 0.95)
    assert (low, high) == (pytest.approx(0.47379, abs=1e-4), pytest.approx(0.94673, abs=1e-4))


def test_bootstrap_keeps_groups_whole() -> None:
    """Groups with totals 0 and 10: two drawn, so that each sum is 0, 10 or 20, with shares 1/4, 1/2, 1/4."""
    sums = resample_totals(np.array([[0.0], [10.0]]), draws=4000, seed=1)[:, 0]
    values, counts = np.unique(sums, return_counts=True)
    assert values.tolist() == [0.0, 10.0, 20.0]
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


@pytest.mark.parametrize("within", [0.0, 0.7], ids=["independent siblings", "like siblings"])
def test_coverage_of_a_quantile(within: float) -> None:
    """True quantiles lie in 95 % intervals, of 60 groups of 8, in 92 to 99 % of 600 draws.

    ``within`` is the correlation of siblings. Intervals that took siblings for independent would hold the truth in
    about 70 % of the draws at 0.7: the second half of the test.
    """
    rng = np.random.default_rng(7)
    share, truth = 0.9, 1.2815516  # of a standard normal
    group = np.repeat(np.arange(60), 8)
    held = naive = 0
    for _ in range(600):
        values = math.sqrt(within) * rng.standard_normal(60)[group] + math.sqrt(1 - within) * rng.standard_normal(480)
        ordered = np.sort(values)
        found = estimate_share(values <= ordered[math.ceil(share * 480) - 1], group)
        low, high = compute_quantile_interval(ordered, share, found.effective, 0.95)
        held += low <= truth <= high
        low, high = compute_quantile_interval(ordered, share, 480, 0.95)
        naive += low <= truth <= high
    assert 0.92 <= held / 600 <= 0.99
    assert (naive / 600 < 0.85) == (within > 0)
