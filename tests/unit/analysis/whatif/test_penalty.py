"""A replay of a penalty and of ``nonfinite=excluded``, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.whatif.measures import build_reference_block, weigh_advantages
from recipe.offpolicy.analysis.whatif.replay import RecordedLoss, count_kept, decide, iterate_blocks
from recipe.offpolicy.correction import BatchConstants, CorrectionSpec
from recipe.offpolicy.correction.correction_parts import PenaltySpec
from tests.support.acted import by_hand
from tests.support.corrections import band, spec

LOG2 = math.log(2.0)
MU = [[-3.0, -2.0, -1.0], [-2.0, -2.0]]
OLD = [[-3.0 + 2 * LOG2, -2.0, -1.0 - LOG2], [-2.0 + LOG2, -2.0 + LOG2]]
ROWS = by_hand(OLD, MU, advantages=np.ones(5, dtype=np.float32))


@pytest.mark.parametrize(("ratio", "expected"), [("full", [2.0, 0.0, -1.0]), ("ppo", [0.0, 0.0, 0.0])])
def test_a_penalty_pulls_by_twice_its_log_ratio(ratio: str, expected: list[float]) -> None:
    """pi is pi_old here: log pi / mu of row 0 is 2, 0 and -1 in units of log 2, log pi / pi_old is 0."""
    penalised = CorrectionSpec(penalty=PenaltySpec(ratio, 0.25))  # type: ignore[arg-type]
    rows = replace(ROWS, log_prob=ROWS.old_log_prob)
    block = next(block for block in iterate_blocks(rows) if 0 in block.rows)
    of = build_reference_block(block, RecordedLoss("gpg"))
    decision = decide(penalised, CorrectionSpec(), block, BatchConstants())
    plain = replace(penalised, penalty=None)
    pull = weigh_advantages(plain, decision, of) - weigh_advantages(penalised, decision, of)
    first = pull[list(block.rows).index(0), :3]
    torch.testing.assert_close(first, 2 * 0.25 * LOG2 * torch.tensor(expected, dtype=torch.float64))


def test_excluded_counts_the_tokens_with_a_finite_mu() -> None:
    """Row 0 loses the token whose mu is NaN, and none that a mask rejects."""
    mu = ROWS.rollout_log_prob.copy()
    mu[1] = math.nan
    excluded = replace(spec(None, band=band(0.9, 1.1)), nonfinite="excluded")
    kept = count_kept(excluded, CorrectionSpec(), replace(ROWS, rollout_log_prob=mu), BatchConstants())
    assert kept.tolist() == [2.0, 2.0]
