"""Verdicts on the hypotheses, computed only from results."""

from __future__ import annotations

import numpy as np
import pytest
from seeds import bootstrap, cliffs_delta, equivalence, holm, page, sign_flip


def test_eight_equal_differences_are_as_significant_as_eight_can_be() -> None:
    assert sign_flip([0.1] * 8) == 2 / 256
    assert sign_flip([0.1] * 8, two_sided=False) == 1 / 256
    assert sign_flip([0.3] * 5) == 2 / 32


def test_sign_flips_by_hand() -> None:
    """The sign patterns of (3, 1, -1) have the sums 3, 1, 5, 3 and their negatives; six of eight are at least
    3 from 0.
    """
    assert sign_flip([3.0, 1.0, -1.0]) == 6 / 8
    assert sign_flip([3.0, 1.0, -1.0], two_sided=False) == 3 / 8
    assert sign_flip([0.0, 0.0]) == 1.0


def test_equivalence_needs_both_sides() -> None:
    assert equivalence([0.0] * 5, 0.05) == 1 / 32
    assert equivalence([0.06] * 5, 0.05) == 1.0
    assert equivalence([-0.06] * 5, 0.05) == 1.0


def test_intervals_effects_and_adjusted_p_values_by_hand() -> None:
    assert bootstrap([0.2] * 8) == pytest.approx((0.2, 0.2))
    low, high = bootstrap(np.arange(8.0))
    # The mean of eight draws of 0 to 7 has a standard deviation of sqrt(5.25 / 8), and is nearly normal.
    assert (low, high) == pytest.approx((3.5 - 1.96 * (5.25 / 8) ** 0.5, 3.5 + 1.96 * (5.25 / 8) ** 0.5), abs=0.1)
    assert cliffs_delta([1, 2], [0, 2]) == pytest.approx((1 - 1 + 1 + 0) / 4)
    assert cliffs_delta([3, 4], [1, 2]) == 1.0
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


def test_pages_trend() -> None:
    falling = np.tile([5.0, 4.0, 3.0, 2.0, 1.0], (10, 1))
    assert page(falling) == pytest.approx(1 / 10_001)
    assert page(falling[:, ::-1]) == 1.0
    assert page(np.ones((10, 5))) == 1.0
