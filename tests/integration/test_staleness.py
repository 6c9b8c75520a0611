"""A limit of staleness in verl's asynchronous modes on CPU: ages, issue, and each prompt trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.offpolicy.recording import Recording
from tests.support.whole_runs import trained

STEPS, BATCH, ROWS = 5, 16, 8
ROOT = "offpolicy/staleness"
WORST = "training/off_policy/trajectory_staleness_worst/max"
"""verl's own count of the oldest row: from its first attempt, which may have been aborted before its first token."""

pytestmark = [pytest.mark.slow, pytest.mark.extended]


STALE = "+correction.masks.stale={aggregate: staleness, level: token, upper: 1}"
SEPARATE, COLOCATED = "+mode=separate_async_cpu", "trainer.v1.trainer_mode=colocate_async"


@pytest.mark.parametrize(
    ("mode", "eta"), [(SEPARATE, 0), (SEPARATE, 1), (SEPARATE, 2), (SEPARATE, 4), (COLOCATED, 0), (COLOCATED, 2)]
)
def test_the_oldest_row_is_eta_old_and_nothing_is_lost(
    mode: str, eta: int, run_program: Callable[..., Any], tmp_path: Path
) -> None:
    """Each update holds the ages of the rows in its loss against eta, or the run stops.

    Colocated rollouts run only while the trainer waits, so that a prompt may begin later than it was issued. In the run
    apart at eta 2 tokens of that age are masked as well.
    """
    masked = [STALE] if (mode, eta) == (SEPARATE, 2) else []
    steps = trained(
        run_program,
        mode,
        f"offpolicy.staleness.eta={eta}",
        *masked,
        f"trainer.total_training_steps={max(STEPS, eta + 2)}",
        f"offpolicy.record.dir={tmp_path / 'recording'}",
    )
    for number, step in enumerate(steps, 1):
        assert step["offpolicy/live/proved"] == 1.0
        assert step[f"{ROOT}/max"] <= step[WORST] <= eta
        assert step[f"{ROOT}/eta"] == eta
        # Step 1 has room for all at once; with no prompt lost each further step takes as many as it trains.
        expected = (eta + 1) * BATCH if number == 1 else BATCH
        assert step[f"{ROOT}/room"] == step[f"{ROOT}/issued"] == expected
        assert step[f"{ROOT}/lost_prompts"] == step[f"{ROOT}/masked_token_share"] == 0.0
        assert step[f"{ROOT}/waited_seconds"] > 0.0
    assert steps[0][f"{ROOT}/max"] == 0.0
    if mode == SEPARATE:
        assert max(step[WORST] for step in steps) == eta
        for step in steps if masked else ():
            assert (step["offpolicy/mask/stale/masked_token_share"] > 0.0) == (step[f"{ROOT}/max"] == eta)
    recording = Recording(tmp_path / "recording")
    rows = recording.rows()
    for found in recording if masked else ():
        rejected = (found.rows.rejected_by >> found.reasons.index("masks.stale")) & 1 == 1
        assert (rejected == (found.rows.token_staleness > 1))[found.rows.response_mask].all()
    assert set(Counter(rows.uid).values()) == {ROWS}
    assert len(set(rows.uid)) == len(steps) * BATCH
