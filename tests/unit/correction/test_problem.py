"""Problems in words: overrides, what a feature needs, bounds; and numbers that are fetched together."""

from __future__ import annotations

import pytest
import torch

from recipe.offpolicy.correction.problem import find_unmet
from recipe.offpolicy.correction.statistics import DeferredValue, fetch
from recipe.offpolicy.replay.batch_routes import list_requirements
from recipe.offpolicy.support.support_settings import REQUIREMENTS

ROWS = {
    f"{row.key} ({name})": row
    for name, rows in (("R3", list_requirements("R3")), ("support", REQUIREMENTS))
    for row in rows
}


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_proposes_meets_it(name: str) -> None:
    row = ROWS[name]
    (problem,) = find_unmet([row], {row.key: "other"}.get, "feature=off", ("part",), {"feature": "on"})
    assert (problem.key, problem.parts, problem.alongside) == (row.key, ("part",), {"feature": "on"})
    assert problem.fix.endswith(", or feature=off.")
    assert len(problem.overrides) == 1 + len(row.together)
    for value in (None, *row.wanted):
        assert list(find_unmet([row], {row.key: value}.get, "", ())) == []


def test_readings_are_fetched_together() -> None:
    floats = DeferredValue(torch.tensor([0.1, -0.0], dtype=torch.float64), list)
    # Beyond 2**53, which a float64 would round.
    integers = DeferredValue(torch.tensor([2**53 + 1]), sum)
    assert fetch([floats, integers]) == [[0.1, -0.0], 2**53 + 1]
    assert fetch([]) == []
