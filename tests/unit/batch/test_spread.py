"""A spread that rounding explains never divides."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.proof.rewards import ROUNDING, measure_spread


def test_by_hand() -> None:
    """Of 1, 2, 6: deviation sqrt((4 + 1 + 9) / 2), root mean square sqrt(41 / 3)."""
    values = torch.tensor([1.0, 2.0, 6.0])
    assert measure_spread(values, centred=True).value == pytest.approx(math.sqrt(7))
    assert measure_spread(values, centred=False).value == pytest.approx(math.sqrt(41 / 3))
    assert measure_spread(values, centred=True).invert(otherwise=9.0) == pytest.approx(1 / math.sqrt(7))


def test_between_rounding_and_a_spread_it_is_continuous() -> None:
    """Two values of size 1 with deviations of 1, 1.5 and 2 times what rounding explains: 0, half and all of 1 / s."""
    for times, share in ((1.0, 0.0), (1.5, 0.5), (2.0, 1.0)):
        apart = times * ROUNDING * math.sqrt(2)
        spread = measure_spread(torch.tensor([1.0, 1.0 - apart], dtype=torch.float64), centred=True)
        assert spread.certainty == pytest.approx(share, abs=1e-8)
        assert spread.invert(otherwise=7.0) == pytest.approx(share / spread.value + (1 - share) * 7, rel=1e-5)


def test_rounding_is_that_of_the_numbers_that_were_subtracted() -> None:
    values = torch.tensor([1e-6, -1e-6])
    assert measure_spread(values, centred=True).certainty == 1.0
    assert measure_spread(values, centred=True, size=2.0).certainty == 0.0


def test_numbers_below_the_normal_ones_are_rounding() -> None:
    """float32 has steps of 2^-149 there, which are as large as the numbers."""
    for values in (torch.tensor([2.0**-149, 0.0]), torch.tensor([5e-324, 0.0], dtype=torch.float64)):
        assert measure_spread(values, centred=True).certainty == 0.0


@pytest.mark.parametrize("centred", [True, False])
def test_nothing_to_divide_by(centred: bool) -> None:
    for values in (torch.zeros(0), torch.zeros(3)):
        assert measure_spread(values, centred=centred).invert(otherwise=3.0) == 3.0
    assert measure_spread(torch.tensor([5.0]), centred=centred).invert() == (0.0 if centred else 0.2)
    with pytest.raises(ValueError, match="value 1 of 2 is nan"):
        measure_spread(torch.tensor([0.0, math.nan]), centred=centred)
