"""A lag is that of the weights nearest to mu."""

from __future__ import annotations

import math

from recipe.offpolicy.monitor.mismatch.late_weights import find_lag


def test_a_lag_is_that_of_the_weights_nearest_to_mu() -> None:
    assert find_lag([0.4, 0.3, 1e-5, 0.2]) == 2
    assert find_lag([2e-3, 0.3, 0.4]) == 0  # two engines, in step
    assert find_lag([0.1]) == 0
    assert find_lag([0.30, 0.28, 0.29]) is None  # mu is of neither
    assert find_lag([0.3, math.nan]) is None
