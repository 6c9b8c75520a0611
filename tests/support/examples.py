"""The number of examples that hypothesis draws, and the number of cases that a run takes of a parametrised test."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "OFFPOLICY_ALL_EXAMPLES"
"""If this variable is set, as by scripts/test.sh --release, every test draws all examples instead of a quarter."""
FEW = "OFFPOLICY_FEW_EXAMPLES"
"""If this variable is set, as by scripts/test.sh --quick, it limits the examples of a test, and the cases to
``PARAMETERS``.
"""
PARAMETERS = 3
"""Number of cases of a parametrised test in a quick run."""


def at_most(number: int) -> int:
    """Return the number of a test's examples: all, a quarter, or few."""
    if few := os.environ.get(FEW):
        return min(number, int(few))
    return number if os.environ.get(VARIABLE) else max(min(number, 15), number // 4)


def choose_few(items: list[pytest.Item]) -> list[pytest.Item]:
    """Choose the tests of ``--quick``: at most ``PARAMETERS`` cases of each parametrised test, drawn by the test's
    name.
    """
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    draws = (random.Random(name).sample(group, min(len(group), PARAMETERS)) for name, group in alike.items())
    return [item for drawn in draws for item in drawn]


def each_nth_by_default(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the default command takes the first of every ``step`` values, ``--release`` takes all.

    For a product of words, choose a step that divides none of their numbers, so that each word occurs.
    """
    arguments = (value if isinstance(value, tuple) else (value,) for value in values)
    extended = [pytest.mark.extended]
    return [pytest.param(*each, marks=extended if index % step else []) for index, each in enumerate(arguments)]
