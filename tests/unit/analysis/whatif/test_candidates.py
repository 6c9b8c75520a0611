"""Overrides and grids become corrections, composed as a launch would compose them."""

from __future__ import annotations

import pytest

from recipe.offpolicy.analysis.whatif.candidates import MOST, build_candidates
from recipe.offpolicy.correction import SpecError
from tests.support.corrections import GSM, TIS, spec

RECORDED = spec(TIS, gsm=GSM).to_mapping()
UPPER = "correction.masks.gsm.upper"


def test_what_was_recorded_changed_at_one_key() -> None:
    _, wide = build_candidates([["recorded"]], [f"{UPPER}=1.01,1.5"], RECORDED)
    assert wide.resolve_spec(RECORDED) == spec(TIS, gsm=GSM | {"upper": 1.5})
    # Another step may have had another cap, which stays.
    other = spec(TIS | {"upper": 7.0}, gsm=GSM).to_mapping()
    assert wide.resolve_spec(other) == spec(TIS | {"upper": 7.0}, gsm=GSM | {"upper": 1.5})
    assert RECORDED["masks"]["gsm"]["upper"] == 1.01


def test_an_invalid_point_is_reported_and_the_others_stay() -> None:
    bad, good = build_candidates([["correction=gsm"]], [f"{UPPER}=0.5,1.5"], RECORDED)
    assert bad.spec is None
    assert "correction.masks.gsm.lower=0.99 with correction.masks.gsm.upper=0.5: nothing lies between" in bad.error
    assert good.error is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("specs", "grid", "words"),
    [
        ([["correction=opsm"]], [], "delta=???: required and not set"),
        ([["correction=gsm"]], ["correction.masks.gsm.uper=1,2"], f"Nearest: '{UPPER}'"),
        ([["recorded"]], ["correction=gsm,icepop"], "--grid correction: no --spec has this key"),
        ([["correction=gsm"]], [f"~{UPPER}"], "deletes a key"),
        ([["correction=gsm"]], [f"{UPPER}=range(2,{MOST + 3})"], f"more than {MOST} corrections"),
        ([["correction=auto"]], [], "depends on a run's configuration"),
        ([["recorded", f"{UPPER}=2"]], [], "recorded takes no overrides. Use --grid"),
    ],
)
def test_what_cannot_be_meant(specs: list[list[str]], grid: list[str], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        build_candidates(specs, grid, RECORDED)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
