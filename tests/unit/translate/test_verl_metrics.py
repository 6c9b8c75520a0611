"""verl's metrics from sums by row, each worked out by hand, and the sums themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recipe.offpolicy.translate.row_sums import QuantitySums, RowSums, compare_with_bounds, measure_rows
from recipe.offpolicy.translate.verl_metrics import (
    compute_mismatch_metrics,
    compute_rejection_metrics,
    compute_total_rejection_metrics,
    compute_weight_metrics,
)

TOKENS = np.array([2.0, 1.0])


def test_distance_of_the_policies() -> None:
    columns = RowSums.from_table(
        np.array(
            [
                TOKENS,
                TOKENS,
                [-2.0, -1.0],  # log pi_old
                [-2.2, -0.9],  # log mu
                [0.2, -0.1],
                [0.02, 0.005],
                [0.03, 0.006],
                [0.5, -0.2],
                [0.0, 0.0],
                [0.0, 0.0],
            ]
        )
    )
    found = compute_mismatch_metrics(columns)
    assert found["training_ppl"] == pytest.approx(math.e)
    assert found["rollout_log_ppl"] == pytest.approx((1.1 + 0.9) / 2)
    assert found["kl"] == pytest.approx(-0.1 / 3)
    assert found["k3_kl"] == pytest.approx(0.036 / 3)
    assert (found["log_ppl_diff_min"], found["log_ppl_diff_max"]) == pytest.approx((-0.1, 0.1))
    assert found["log_ppl_abs_diff"] == pytest.approx(0.1)
    assert found["chi2_token"] == pytest.approx(0.3 / 3)
    assert found["chi2_seq"] == pytest.approx((math.exp(0.4) + math.exp(-0.2)) / 2 - 1)


def test_weights_before_and_after_a_cap() -> None:
    """Weights 1 and 3, and 0.5, capped at 2; shares beyond [0.6, 2]."""
    raw = [[4, 0.5], [10, 0.25], [2, -0.5], [4, 0.25], [1, 0.5], [3, 0.5], [1, 0], [0, 1]]
    applied = [[3, 0.5], [5, 0.25], [1, -0.5], [1, 0.25], [1, 0.5], [2, 0.5], [0, 0], [0, 0]]
    table = np.stack([np.array(raw, dtype=float), np.array(applied, dtype=float)], axis=1)
    found = compute_weight_metrics(TOKENS, QuantitySums(np.ones(2, dtype=bool), np.ones(2), table), 0.6, 2.0)
    assert found["rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert (found["rollout_is_min"], found["rollout_is_max"]) == (0.5, 2.0)
    assert found["rollout_is_std"] == pytest.approx(np.std([1, 2, 0.5]))
    assert found["rollout_is_eff_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert found["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert found["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 3)
    # Raw row means are 2 and 0.5, applied ones 1.5 and 0.5.
    assert (found["rollout_is_seq_fraction_high"], found["rollout_is_seq_fraction_low"]) == (0.0, 0.5)
    assert found["rollout_is_seq_mean"] == pytest.approx(1.0)


def test_shares_that_a_rejection_takes() -> None:
    """k1 of 0.1 and 0.5, and of -0.3, within [-0.2, 0.2]."""
    table = np.array([[0.6, -0.3], [0.26, 0.09], [0.3, -0.2], [0.05, 0.04], [0.1, -0.3], [0.5, -0.3], [1, 0], [0, 1]])
    statistics = QuantitySums(np.ones(1, dtype=bool), np.zeros(1), table[:, None, :])
    found = compute_rejection_metrics({"token_k1": (-0.2, 0.2)}, TOKENS, statistics)
    prefix = "rollout_rs_token_k1"
    assert found[f"{prefix}_mean"] == pytest.approx(0.1)
    assert (found[f"{prefix}_min"], found[f"{prefix}_max"]) == (-0.3, 0.5)
    assert found[f"{prefix}_std"] == pytest.approx(np.std([0.1, 0.2, -0.2]))  # of values clamped to the bounds
    assert found[f"{prefix}_masked_fraction"] == pytest.approx(2 / 3)
    assert (found[f"{prefix}_seq_fraction_high"], found[f"{prefix}_seq_fraction_low"]) == (0.5, 0.5)
    assert found[f"{prefix}_seq_masked_fraction"] == 1.0


def test_shares_of_all_rejections_together() -> None:
    assert compute_total_rejection_metrics(TOKENS, np.array([1.0, 0.0])) == {
        "rollout_rs_masked_fraction": pytest.approx(1 / 3),
        "rollout_rs_seq_masked_fraction": 0.5,
    }


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
