"""Recorded rows as tensors, and pi_old as a candidate takes it."""

from __future__ import annotations

import numpy as np

from recipe.offpolicy.analysis.whatif.blocks import concatenate_rows
from recipe.offpolicy.analysis.whatif.replay import compute_pi_old
from recipe.offpolicy.correction import CorrectionSpec
from tests.support.recordings import drawn_rows

ROWS = drawn_rows(
    [2, 1],
    rollout_log_prob=np.array([-1.0, -2.0, -3.0], dtype=np.float32),
    old_log_prob=np.array([-4.0, -5.0, -6.0], dtype=np.float32),
)


def test_all_tokens_in_one_row() -> None:
    block = concatenate_rows(ROWS)
    assert block.rollout_log_prob.tolist() == [[-1.0, -2.0, -3.0]]
    assert block.place.all()


def test_pi_old_is_the_recorded_one_where_it_has_the_same_source() -> None:
    block, recorded = concatenate_rows(ROWS), CorrectionSpec()
    assert compute_pi_old(CorrectionSpec(), recorded, block).tolist() == [[-4.0, -5.0, -6.0]]
    bypass = CorrectionSpec(proximal="bypass")
    assert compute_pi_old(bypass, recorded, block).tolist() == [[-1.0, -2.0, -3.0]]
    assert compute_pi_old(bypass, bypass, block).tolist() == [[-4.0, -5.0, -6.0]]
