"""What of a decomposition is not identified, and which rows it may rest on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.causes.cause import Cause
from recipe.offpolicy.analysis.attribution.decomposition import (
    Decomposition,
    drop_drift,
    merge_backend_and_staleness,
)
from recipe.offpolicy.analysis.attribution.faults import has_stale_tokens, has_unnoticed_staleness
from recipe.offpolicy.analysis.attribution.scored_rows import select_scored_rows
from recipe.offpolicy.monitor.mismatch.shares import Shares
from recipe.offpolicy.recording import Step
from tests.support.recordings import drawn_rows, sampled_by

SHARES = Shares(whole=0.5, rollout=0.8, backend=0.5, staleness=0.3, drift=0.2)
FOUND = Decomposition(
    tokens=10,
    variance=SHARES,
    kl=SHARES,
    intervals={f"kl.{part}": (0.1, 0.3) for part in ("rollout", "backend", "staleness", "drift")},
    floor_from="own rows",
)


def test_without_later_gradient_steps_drift_is_not_identified() -> None:
    found = drop_drift(FOUND)
    assert found.variance == found.kl == replace(SHARES, drift=None)
    assert list(found.intervals) == ["kl.rollout", "kl.backend", "kl.staleness"]
    assert replace(found, variance=SHARES, kl=SHARES, intervals=FOUND.intervals) == FOUND


def test_with_staleness_that_nobody_noted_only_the_rollout_as_a_whole_is_identified() -> None:
    found = merge_backend_and_staleness(FOUND)
    assert found.kl == replace(SHARES, backend=None, staleness=None)
    assert list(found.intervals) == ["kl.rollout", "kl.drift"]
    assert (found.floor_from, found.together) == ("", "backend and unnoticed staleness")


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


def test_rows_are_scored_by_the_trainers_own_weights() -> None:
    """Under bypass pi stands in for pi_old at the first gradient step; rows of later ones are left out and counted."""
    rows = replace(drawn_rows([2, 3, 1], drift=0.1), mini_batch=np.array([0, 1, 0], dtype=np.int32))
    recomputed = select_scored_rows([Step(rows, {"proximal": "recompute"}, ())])
    assert recomputed.left_out == 0
    assert recomputed.rows.old_log_prob.tolist() == rows.old_log_prob.tolist()
    bypassed = select_scored_rows([Step(rows, {"proximal": "bypass"}, ())] * 2)
    assert bypassed.left_out == 2
    assert bypassed.rows.old_log_prob.tolist() == rows.log_prob[[0, 1, 5]].tolist() * 2
