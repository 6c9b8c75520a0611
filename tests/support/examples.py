"""How many examples hypothesis draws, and how many cases of a parametrised test a run takes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

VARIABLE = "OFFPOLICY_ALL_EXAMPLES"
"""Set, also by scripts/test.sh --release: every test draws all of its examples, and not a quarter of them."""
FEW = "OFFPOLICY_FEW_EXAMPLES"
"""Set, also by scripts/test.sh --quick: no test draws more examples, and each takes at most ``PARAMETERS`` cases."""
PARAMETERS = 3
"""How many cases of a parametrised test a quick run takes."""


def at_most(number: int) -> int:
    """A test's examples: all of them, a quarter, or few."""
    if few := os.environ.get(FEW):
        return min(number, int(few))
    return number if os.environ.get(VARIABLE) else max(min(number, 15), number // 4)


def choose_few(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of ``--quick``: at most ``PARAMETERS`` of each parametrised test, drawn by its name."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    draws = (random.Random(name).sample(group, min(len(group), PARAMETERS)) for name, group in alike.items())
    return [item for drawn in draws for item in drawn]


def each_nth_by_default(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the default command takes the first of every ``step`` values, ``--release`` all of them.

    Of a product of words, a step that divides the number of none of them takes each word in its turn.
    """
    arguments = (value if isinstance(value, tuple) else (value,) for value in values)
    extended = [pytest.mark.extended]
    return [pytest.param(*each, marks=extended if index % step else []) for index, each in enumerate(arguments)]
