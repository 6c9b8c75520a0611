"""Sums of quantities that have one value a row, by hand."""

from __future__ import annotations

import numpy as np

from recipe.offpolicy.translate.row_sums import measure_rows


def test_one_value_a_row() -> None:
    """Values 2 and -1 over 3 and 1 tokens, clamped to [0, 1.5], about 1; the first is above, the second below."""
    found = measure_rows(
        np.array([[2.0, -1.0]]),
        np.array([3.0, 1.0]),
        (np.array([[True, False]]), np.array([[False, True]])),
        clamp=(np.array([0.0]), np.array([1.5])),
        about=1.0,
    )
    assert found.of_tokens.tolist() == [False]
    assert found.total.tolist() == [[6.0, -1.0]]
    assert found.square.tolist() == [[12.0, 1.0]]
    assert found.deviation.tolist() == [[1.5, -1.0]]
    assert found.squared_deviation.tolist() == [[0.75, 1.0]]
    assert found.least.tolist() == found.greatest.tolist() == [[2.0, -1.0]]
    assert (found.above.tolist(), found.below.tolist()) == ([[3.0, 0.0]], [[0.0, 1.0]])
