"""What of a decomposition is not identified, which rows it may rest on, and Poisson variables of mean 1."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.attribution import has_stale_tokens, has_unnoticed_staleness
from recipe.offpolicy.analysis.attribution.cause import Cause
from recipe.offpolicy.analysis.attribution.decomposition import BOUNDS, draw_poisson
from tests.support.recordings import drawn_rows, sampled_by


@pytest.mark.parametrize(
    ("verdict", "ages", "unnoticed"),
    [("present", [0, 0], True), ("present", [0, 1], False), ("absent", [0, 0], False), ("present", [-1, 0], True)],
)
def test_staleness_is_unnoticed_where_no_row_is_recorded_as_stale(
    verdict: str, ages: list[int], unnoticed: bool
) -> None:
    rows = drawn_rows([2, 2], step=5)
    versions = np.where(np.array(ages) < 0, -1, 4 - np.array(ages))
    rows = sampled_by(rows, versions)
    cause = Cause("stale weights", verdict, {}, "Found.")  # type: ignore[arg-type]
    stale = has_stale_tokens(rows)
    assert has_unnoticed_staleness([cause], stale=stale) is unnoticed
    assert not has_unnoticed_staleness([replace(cause, name="numerics")], stale=stale)


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
