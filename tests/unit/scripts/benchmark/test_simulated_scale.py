"""Growth by size: every part runs at a small one, and the figures are those of the rows; no time is asserted."""

from __future__ import annotations

import math

import pytest

from scripts.benchmark.simulated_scale import fit_exponent

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")


def test_exponents_by_hand() -> None:
    assert fit_exponent([(8, 2.0), (16, 4.0), (32, 8.0)]) == pytest.approx(1.0)
    # log2 of 1, 1 and 8 over 0, 1, 2: a slope of 1.5.
    assert fit_exponent([(1, 1.0), (2, 1.0), (4, 8.0)]) == pytest.approx(1.5)
    assert math.isnan(fit_exponent([(8, 2.0)]))
