"""verl's metrics from sums by row, each worked out by hand, and the sums themselves."""

from __future__ import annotations

import numpy as np
import pytest

from recipe.offpolicy.translate.batch_sums import QuantitySums, compare_with_bounds, measure_rows
from recipe.offpolicy.translate.rollout_correction import (
    compute_weight_metrics,
)

TOKENS = np.array([2.0, 1.0])


def test_weights_before_and_after_a_cap() -> None:
    """Weights 1 and 3, and 0.5, capped at 2; shares beyond [0.6, 2]."""
    raw = [[4, 0.5], [10, 0.25], [2, -0.5], [4, 0.25], [1, 0.5], [3, 0.5], [1, 0], [0, 1]]
    applied = [[3, 0.5], [5, 0.25], [1, -0.5], [1, 0.25], [1, 0.5], [2, 0.5], [0, 0], [0, 0]]
    table = np.stack([np.array(raw, dtype=float), np.array(applied, dtype=float)], axis=1)
    found = compute_weight_metrics(TOKENS, QuantitySums(np.ones(2, dtype=bool), table), 0.6, 2.0)
    assert found["rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert (found["rollout_is_min"], found["rollout_is_max"]) == (0.5, 2.0)
    assert found["rollout_is_std"] == pytest.approx(np.std([1, 2, 0.5]))
    assert found["rollout_is_eff_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert found["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert found["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    # Raw row means are 2 and 0.5, applied ones 1.5 and 0.5.
    assert (found["rollout_is_seq_fraction_high"], found["rollout_is_seq_fraction_low"]) == (0.0, 0.5)
    assert found["rollout_is_seq_mean"] == pytest.approx(1.0)


def test_bounds_are_inclusive() -> None:
    values = np.array([[0.2, 0.21, -0.2, -0.21]])
    above, below = compare_with_bounds(values, np.array([-0.2]), np.array([0.2]))
    assert above.tolist() == [[False, True, False, False]]
    assert below.tolist() == [[False, False, False, True]]


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
    assert found["total"].tolist() == [[6.0, -1.0]]
    assert found["square"].tolist() == [[12.0, 1.0]]
    assert found["deviation"].tolist() == [[1.5, -1.0]]
    assert found["squared_deviation"].tolist() == [[0.75, 1.0]]
    assert found["least"].tolist() == found["greatest"].tolist() == [[2.0, -1.0]]
    assert (found["above"].tolist(), found["below"].tolist()) == ([[3.0, 0.0]], [[0.0, 1.0]])
