"""Bounds that move during a run are those of named masks, and the cap of the weight."""

from __future__ import annotations

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.correction.spec import WEIGHT, read_bounds, replace_bounds
from tests.support.corrections import GSM, TIS, spec

BOTH = spec(TIS, gsm=GSM)


def test_bounds_are_found_by_name() -> None:
    assert read_bounds(BOTH, {"gsm", WEIGHT}) == {"gsm": {"lower": 0.99, "upper": 1.01}, WEIGHT: {"upper": 2.0}}
    assert read_bounds(BOTH, {"opsm"}) == {}
    assert read_bounds(spec(None, gsm=GSM), {WEIGHT}) == {}


def test_bounds_are_put_in_and_nothing_else_changes() -> None:
    moved = replace_bounds(BOTH, {"gsm": {"lower": 0.9, "upper": 1.1}, WEIGHT: {"upper": 3.0}})
    assert moved == spec(TIS | {"upper": 3.0}, gsm=GSM | {"lower": 0.9, "upper": 1.1})
    assert replace_bounds(BOTH, read_bounds(BOTH, {"gsm", WEIGHT})) is BOTH


def test_bounds_of_no_part_and_bounds_that_cross_are_refused() -> None:
    with pytest.raises(KeyError, match="opsm"):
        replace_bounds(BOTH, {"opsm": {"upper": 0.1}})
    with pytest.raises(SpecError):
        replace_bounds(BOTH, {"gsm": {"lower": 1.2, "upper": 1.1}})
