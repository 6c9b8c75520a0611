"""Problems name the override that fixes them; numbers are fetched together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.problem import find_unmet
from recipe.offpolicy.correction.statistics import DeferredValue, fetch
from recipe.offpolicy.replay.batch_routes import list_requirements
from recipe.offpolicy.support.support_settings import REQUIREMENTS
from tests.support.corrections import GSM, TIS
from tests.support.refusals import refused

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


ON: dict[str, Any] = {"support": "engine"}


@pytest.mark.parametrize(
    ("mapping", "said", "proposed"),
    [
        ({"support": "trainer"}, "correction.support=trainer", "correction.support=engine"),
        (ON | {"support_unknown": "drop"}, "Set one of mask, full.", "correction.support_unknown=mask"),
        (ON | {"support_size": 0}, "correction.support_size=0", "correction.support_size=null"),
        (ON | {"support_size": True}, "correction.support_size=true", "correction.support_size=null"),
        (ON | {"support_min_p": 1.5}, "above 0 and below 1", "correction.support_min_p=0.1"),
        ({"support_size": 8}, "read only with correction.support=engine", "correction.support=engine"),
        ({"support_unknown": "full"}, "read only with correction.support=engine", "correction.support=engine"),
        ({"support_min_p": 0.1}, "read only with correction.support=engine", "correction.support=engine"),
        (ON | {"weight": TIS | {"normalize": True}}, "weight.normalize=true", "correction.support_unknown=full"),
        (
            ON | {"masks": {"gsm": GSM}, "denominator": "kept"},
            "with correction.support=engine and correction.denominator=kept: the trainer counts a batch's tokens",
            "correction.support_unknown=full",
        ),
        (ON | {"allow_truncated_sampling": True}, "nothing to allow", "correction.allow_truncated_sampling=false"),
    ],
)
def test_what_is_refused_names_the_override_that_fixes_it(mapping: dict[str, Any], said: str, proposed: str) -> None:
    refused(mapping, said)
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_mapping(mapping)
    assert caught.value.problem.overrides == (proposed,)
    key, _, value = proposed.partition("=")
    fixed: Any = {"null": None, "false": False, "0.1": 0.1}.get(value, value)
    CorrectionSpec.from_mapping(mapping | {key.removeprefix("correction."): fixed})


@pytest.mark.parametrize(
    "asked", [{"kl_clip": {"lower": 0.8, "upper": 1.2}}, {"kl_weight": {"ratio": "full", "upper": None}}]
)
def test_no_fix_gives_up_the_other_half_of_what_was_asked_for(asked: dict[str, Any]) -> None:
    refused(ON | asked, "covers the support")
    with pytest.raises(SpecError) as caught:
        CorrectionSpec.from_mapping(ON | asked)
    assert caught.value.problem.overrides == ()
