"""Checks of a section's values."""

from __future__ import annotations

import math

import pytest

from recipe.offpolicy.correction import SpecError
from recipe.offpolicy.extensions.setting_checks import check_keys, is_count, is_flag, is_number, is_positive, optional


def test_kinds_of_values() -> None:
    assert [is_number(value) for value in (1, 0.5, True, math.inf, "1", None)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert [is_count(value) for value in (1, 0, 2.0, True)] == [True, False, False, False]
    assert is_count(0, 0)
    assert [is_positive(value) for value in (0.1, 0, -1, None)] == [True, False, False, False]
    assert [is_flag(value) for value in (True, False, 0, None)] == [True, True, False, False]
    assert optional(is_flag)(None)
    assert not optional(is_flag)(1)


def test_each_problem_has_an_override() -> None:
    known = {"n": (is_count, "a count", 1)}
    assert check_keys("s", {"n": 3}, known) == {"n": 3}
    for values, override in (({"n": 0}, "s.n=1"), ({"N": 1}, "s.n=1")):
        with pytest.raises(SpecError) as caught:
            check_keys("s", values, known)
        assert caught.value.problem.overrides[-1] == override
    with pytest.raises(SpecError, match="not a mapping"):
        check_keys("s", 3, known)
