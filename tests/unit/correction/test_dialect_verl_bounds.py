"""Bounds in verl's keys: a cap, a pair, and the inverse ratio of its k1."""

from __future__ import annotations

from typing import Any

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.correction.dialects.verl import read_verl_rejections, read_verl_weight_bounds


@pytest.mark.parametrize(("threshold", "bounds"), [(2.0, (None, 2.0)), ("0.5_2.0", (0.5, 2.0)), ("5", (None, 5.0))])
def test_a_weight_has_a_cap_or_a_pair(threshold: Any, bounds: tuple[float | None, float]) -> None:
    assert read_verl_weight_bounds(threshold, "rollout_is_threshold") == bounds


@pytest.mark.parametrize("threshold", [None, 0.52, "a_b"])
def test_a_weight_without_a_cap_of_at_least_one_is_refused(threshold: Any) -> None:
    with pytest.raises(SpecError, match="rollout_is_threshold"):
        read_verl_weight_bounds(threshold, "rollout_is_threshold")


def test_each_rejection_has_its_threshold() -> None:
    """verl writes k1 on mu / pi_old: [0.5, 4] there is [0.25, 2] of pi_old / mu."""
    found = read_verl_rejections("token_k1,seq_mean_k3,token_k1", "0.5_4,0.1", "rollout_correction.")
    assert found == {"token_k1": (pytest.approx(0.25), pytest.approx(2.0)), "seq_mean_k3": (None, 0.1)}
    assert read_verl_rejections(None, None, "") == {}


@pytest.mark.parametrize(
    ("options", "threshold"), [(None, 0.1), ("", 0.1), ("token_k4", 0.1), ("token_k2", None), ("token_k2", "0.1,0.2")]
)
def test_rejections_that_would_do_nothing_are_refused(options: Any, threshold: Any) -> None:
    with pytest.raises(SpecError, match=r"rollout_correction\.rollout_rs"):
        read_verl_rejections(options, threshold, "rollout_correction.")
