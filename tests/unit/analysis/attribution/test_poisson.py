"""Poisson variables of mean 1."""

from __future__ import annotations

import math

import numpy as np

from recipe.offpolicy.analysis.attribution.poisson import BOUNDS, draw_poisson


def test_each_value_has_its_probability() -> None:
    """Between successive bounds lie exp(-1) / k! of 2^32 uniform values, and mean and variance are 1."""
    shares = np.diff([0, *BOUNDS, 2**32]) / 2**32
    expected = [math.exp(-1) / math.factorial(k) for k in range(len(shares))]
    assert np.abs(shares - expected).max() < 2**-32
    values = np.arange(len(shares))
    mean = (shares * values).sum()
    assert abs(mean - 1) < 1e-8
    assert abs((shares * values**2).sum() - mean**2 - 1) < 1e-7


def test_uniform_values_are_compared_with_the_bounds() -> None:
    class Uniform:
        def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
            assert (low, high, shape, dtype) == (0, 2**32, (2, 3), np.uint32)
            return np.array([[0, BOUNDS[0] - 1, BOUNDS[0]], [BOUNDS[1] - 1, BOUNDS[1], 2**32 - 1]], dtype=np.uint32)

    assert draw_poisson(Uniform(), (2, 3)).tolist() == [[0.0, 0.0, 1.0], [1.0, 2.0, 12.0]]  # type: ignore[arg-type]
