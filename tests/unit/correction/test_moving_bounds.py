"""Bounds that move during a run are those of named masks, and the cap of the weight."""

from __future__ import annotations

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.correction.moving_bounds import WEIGHT, bounds_of, path_of, with_bounds
from tests.support.corrections import GSM, TIS, spec

BOTH = spec(TIS, gsm=GSM)


def test_bounds_are_found_by_name() -> None:
    assert bounds_of(BOTH, {"gsm", WEIGHT}) == {"gsm": {"lower": 0.99, "upper": 1.01}, WEIGHT: {"upper": 2.0}}
    assert bounds_of(BOTH, {"opsm"}) == {}
    assert bounds_of(spec(None, gsm=GSM), {WEIGHT}) == {}


def test_bounds_are_put_in_and_nothing_else_changes() -> None:
    moved = with_bounds(BOTH, {"gsm": {"lower": 0.9, "upper": 1.1}, WEIGHT: {"upper": 3.0}})
    assert moved == spec(TIS | {"upper": 3.0}, gsm=GSM | {"lower": 0.9, "upper": 1.1})
    assert with_bounds(BOTH, bounds_of(BOTH, {"gsm", WEIGHT})) is BOTH


def test_bounds_of_no_part_and_bounds_that_cross_are_refused() -> None:
    with pytest.raises(KeyError, match="opsm"):
        with_bounds(BOTH, {"opsm": {"upper": 0.1}})
    with pytest.raises(SpecError):
        with_bounds(BOTH, {"gsm": {"lower": 1.2, "upper": 1.1}})


def test_a_part_stands_below_correction() -> None:
    assert path_of("gsm") == "masks.gsm"
    assert path_of(WEIGHT) == "weight"
