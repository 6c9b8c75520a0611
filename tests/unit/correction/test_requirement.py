"""Values that a feature needs of other keys: each row refuses others and is met by what it proposes."""

from __future__ import annotations

import pytest

from recipe.offpolicy.correction.requirement import Requirement, find_unmet
from recipe.offpolicy.replay.obstacles import list_requirements
from recipe.offpolicy.support.obstacles import REQUIREMENTS

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


def test_further_keys_are_set_with_it() -> None:
    row = Requirement("kl_in_reward", (False,), "it does not fit.", (("kl_loss", True),))
    (problem,) = find_unmet([row], {"kl_in_reward": True}.get, "support=null", ())
    assert problem.overrides == ("kl_in_reward=false", "kl_loss=true")
    assert problem.fix == "Set kl_in_reward=false and kl_loss=true, or support=null."
