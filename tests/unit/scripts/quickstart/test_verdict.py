"""From metrics to verdict, table and picture."""

from __future__ import annotations

import pytest

from scripts.quickstart.report import (
    FAILED,
    NOT_LIVE,
    NOT_RISEN,
    OK,
    History,
    judge,
)

SCORE = "val-core/reasoning_gym/spell_backward/acc/mean@1"


def made_up(before: float | None, after: float | None, proved: float = 1.0, steps: int = 4) -> History:
    """A run whose reward rises by 0.1 per step from 0.3."""
    records: list[tuple[int, dict]] = [(0, {} if before is None else {SCORE: before})]
    for step in range(1, steps + 1):
        data = {
            "critic/rewards/mean": 0.2 + 0.1 * step,
            "offpolicy/kl/k3": 1e-4 * step,
            "offpolicy/weight/ess": 0.99,
            "offpolicy/keep/token_share": 0.9,
            "offpolicy/live/proved": proved,
            "timing_s/step": 2.5,
        }
        if step == steps and after is not None:
            data[SCORE] = after
        records.append((step, data))
    return History(records)


@pytest.mark.parametrize(
    ("history", "corrected", "judged", "code"),
    [
        (made_up(0.3, 0.8), True, True, OK),
        (made_up(0.3, 0.4), True, True, OK),
        (made_up(0.3, 0.39), True, True, NOT_RISEN),
        (made_up(0.3, 0.1), True, False, OK),  # fewer steps, or another model: shown, not judged
        (made_up(0.3, 0.8, proved=0.0), True, True, NOT_LIVE),
        (made_up(0.3, 0.8, proved=0.0), False, True, OK),  # correction=none has nothing to prove
        (made_up(None, 0.8), True, True, FAILED),
        (History(), True, True, FAILED),
    ],
)
def test_verdicts(history, corrected, judged, code):
    assert judge(history, corrected=corrected, judged=judged)[0] == code
