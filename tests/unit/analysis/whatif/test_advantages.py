"""Candidates whose training would have had other advantages than those that were recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipe.offpolicy.analysis.whatif.replay import needs_other_advantages
from recipe.offpolicy.correction import CorrectionSpec
from tests.support.corrections import GSM, TIS, spec

INCLUDE = spec(TIS, gsm=GSM)
EXCLUDE = replace(INCLUDE, baseline="exclude")


@pytest.mark.parametrize(
    ("candidate", "recorded", "other"),
    [
        (INCLUDE, spec(TIS), False),
        (EXCLUDE, EXCLUDE, False),
        (EXCLUDE, INCLUDE, True),
        (INCLUDE, EXCLUDE, True),
        (replace(spec(TIS), baseline="exclude"), EXCLUDE, True),
        (replace(EXCLUDE, proximal="bypass"), EXCLUDE, False),
    ],
)
def test_a_baseline_without_rejected_rows_depends_on_the_masks(
    candidate: CorrectionSpec, recorded: CorrectionSpec, other: bool
) -> None:
    assert needs_other_advantages(candidate, recorded) is other
