"""Words of a calibration's tables."""

from __future__ import annotations

import pytest

from recipe.offpolicy.analysis.calibration.calibration_tables import format_bounds, format_bucket


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"lower": 0.99, "upper": 1.01}, "[0.99, 1.01]"),
        ({"upper": 2.0}, "upper 2.0"),
        ({"delta": 0.1}, "delta 0.1"),
        ({}, ""),
    ],
)
def test_bounds(values: dict[str, float], shown: str) -> None:
    assert format_bounds(values) == shown


def test_buckets_by_length() -> None:
    assert format_bucket("le64") == "17 to 64"
    assert format_bucket("le16") == "1 to 16"
    assert format_bucket("gt4096") == "over 4096"
