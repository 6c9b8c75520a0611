"""Candidates as they are typed: keys, grids and values of Hydra's grammar."""

from __future__ import annotations

import pytest

from recipe.offpolicy.analysis.whatif.compose import parse_grid, parse_key, parse_value, suggest_keys
from recipe.offpolicy.correction import SpecError


def test_values_are_read_as_hydra_reads_them() -> None:
    assert [parse_value(text) for text in ("1.01", "null", "true", "gsm")] == [1.01, None, True, "gsm"]


def test_the_key_that_an_override_sets() -> None:
    assert parse_key("correction.weight.upper=3") == "correction.weight.upper"
    assert parse_key("~correction.masks.gsm") == "correction.masks.gsm"


def test_grids_are_sweeps_or_one_value() -> None:
    assert parse_grid("correction.weight.upper=2,3.5") == ("correction.weight.upper", ["2", "3.5"])
    assert parse_grid("correction.weight.upper=2") == ("correction.weight.upper", ["2"])
    with pytest.raises(SpecError, match="deletes a key"):
        parse_grid("~correction.weight")


def test_what_is_no_override() -> None:
    with pytest.raises(SpecError, match="not a Hydra override"):
        parse_key("no override")


def test_near_keys_are_suggested_or_all() -> None:
    known = ["correction.weight.upper", "correction.proximal"]
    assert suggest_keys("correction.weight.uper", known) == "Nearest: 'correction.weight.upper'."
    assert suggest_keys("correction.zzz", known) == "There are: 'correction.proximal', 'correction.weight.upper'."
