"""What of a decomposition is not identified, and which rows it may rest on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.causes.cause import Cause
from recipe.offpolicy.analysis.attribution.faults import has_stale_tokens, has_unnoticed_staleness
from tests.support.recordings import drawn_rows, sampled_by


@pytest.mark.parametrize(
    ("verdict", "ages", "unnoticed"),
    [("present", [0, 0], True), ("present", [0, 1], False), ("absent", [0, 0], False), ("present", [-1, 0], True)],
)
def test_staleness_is_unnoticed_where_no_row_is_recorded_as_stale(
    verdict: str, ages: list[int], unnoticed: bool
) -> None:
    rows = drawn_rows([2, 2], step=5)
    versions = np.where(np.array(ages) < 0, -1, 4 - np.array(ages))
    rows = sampled_by(rows, versions)
    cause = Cause("stale weights", verdict, {}, "Found.")  # type: ignore[arg-type]
    stale = has_stale_tokens(rows)
    assert has_unnoticed_staleness([cause], stale=stale) is unnoticed
    assert not has_unnoticed_staleness([replace(cause, name="numerics")], stale=stale)
