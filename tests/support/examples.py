"""How many examples hypothesis draws, and how many of many alike cases a quick run and the default one take."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest

VARIABLE = "OFFPOLICY_ALL_EXAMPLES"
"""Set, also by scripts/test.sh --release: every test draws all of its examples, and not a quarter of them."""
FEW = "OFFPOLICY_FEW_EXAMPLES"
"""Set, also by scripts/test.sh --quick: no test draws more than these."""


def at_most(number: int) -> int:
    """A test's examples: all of them, a quarter, or few."""
    if few := os.environ.get(FEW):
        return min(number, int(few))
    return number if os.environ.get(VARIABLE) else max(min(number, 15), number // 4)


def few_when_quick(values: Iterable[Any], kind: Callable[[Any], Hashable]) -> list[Any]:
    """Parameters of a test: ``--quick`` takes the first value of each kind, every other run all of them."""
    seen: set[Hashable] = set()
    parameters = []
    for value in values:
        known = kind(value) in seen
        seen.add(kind(value))
        arguments = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*arguments, marks=[pytest.mark.slow] if known else []))
    return parameters


def each_nth_when_quick(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: ``--quick`` takes the first of every ``step`` values, every other run all of them."""
    return _mark_others(step, values, pytest.mark.slow)


def each_nth_by_default(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the default command takes the first of every ``step`` values, ``--release`` all of them.

    Of a product of words, a step that divides the number of none of them takes each word in its turn.
    """
    return _mark_others(step, values, pytest.mark.extended)


def _mark_others(step: int, values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    arguments = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*each, marks=[mark] if index % step else []) for index, each in enumerate(arguments)]
