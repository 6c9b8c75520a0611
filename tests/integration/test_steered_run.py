"""A fallback and moving bounds in a whole run: every second batch is stale, and what is in force changes with it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 420.0

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(int(LIMIT) + 60)]


def test_a_stale_batch_sets_off_the_fallback_and_a_fresh_one_ends_it(run_program: Callable[..., Any]) -> None:
    alarm = "offpolicy.alarms.ess"
    finished = run_program(
        [
            "bash",
            str(ROOT / "scripts" / "quickstart.sh"),
            "correction=gsm",
            "trainer.total_training_steps=4",
            "trainer.v1.trainer_mode=colocate_async",
            "actor_rollout_ref.actor.optim.lr=3e-3",
            *(f"offpolicy.alarms.{name}.action=off" for name in ("mean_weight", "kept_share", "mismatch_growth")),
            *(f"{alarm}.{key}=0.99" for key in ("lower", "recovery_lower")),
            *(f"{alarm}.{key}=1" for key in ("patience", "recovery_patience", "return_after")),
            f"{alarm}.action=fallback",
            f"{alarm}.fallback=[tis_token,gsm]",
            "offpolicy.calibrate.target_kept=0.7",
            "offpolicy.calibrate.warmup=1",
        ],
        limit=LIMIT,
        cwd=ROOT,
        VENV=os.environ.get("VENV") or sys.prefix,
    )
    assert finished.returncode == 0, finished.output[-3000:]
    folder = re.search(r"everything goes to (\S+)", finished.output)
    assert folder is not None
    lines = (ROOT / folder.group(1) / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in (json.loads(line)["data"] for line in lines) if "actor/grad_norm" in step]
    # Odd batches are fresh. The second and the fourth set the alarm off, the third runs the fallback and is quiet.
    assert [step["offpolicy/alarm/ess"] for step in steps] == [0, 1, 0, 1]
    assert [step["offpolicy/alarm/active_correction"] for step in steps] == [0, 0, 1, 0]
    assert [step["offpolicy/live/proved"] for step in steps] == [1, 1, 1, 1]
    prints = [step["offpolicy/live/fingerprint"] for step in steps]
    assert prints[0] == prints[1] == prints[3] != prints[2]
    # More than 0.7 of the first batch was kept, so that the band has closed, and stays while the fallback is there.
    kept, upper = ([step[f"offpolicy/calibrate/gsm/{part}"] for step in steps] for part in ("kept", "upper"))
    assert kept[0] > 0.7
    assert upper[0] == 1.01 > upper[1] == upper[2] == upper[3]
    assert kept[2] is None or kept[2] != kept[2]
    keys = {frozenset(key for key in step if key.startswith(("offpolicy/alarm", "offpolicy/calib"))) for step in steps}
    assert len(keys) == 1
