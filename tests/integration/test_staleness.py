"""A staleness limit in verl's asynchronous modes on a CPU: ages, issue of prompts, and each prompt trained once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from recipe.offpolicy.recording import Recording
from tests.support.whole_runs import broken, trained

STEPS, BATCH, ROWS = 5, 16, 8
ROOT = "offpolicy/staleness"
WORST = "training/off_policy/trajectory_staleness_worst/max"
"""verl's own age of the oldest row, counted from its first attempt, which may have been aborted before its
first token.
"""

pytestmark = [pytest.mark.slow, pytest.mark.extended]


STALE = "+correction.masks.stale={aggregate: staleness, level: token, upper: 1}"
SEPARATE, COLOCATED = "+mode=separate_async_cpu", "trainer.v1.trainer_mode=colocate_async"


@pytest.mark.parametrize(
    ("mode", "eta"), [(SEPARATE, 0), (SEPARATE, 1), (SEPARATE, 2), (SEPARATE, 4), (COLOCATED, 0), (COLOCATED, 2)]
)
def test_the_oldest_row_is_eta_old_and_nothing_is_lost(
    mode: str, eta: int, run_program: Callable[..., Any], tmp_path: Path
) -> None:
    """Each update compares the ages of its rows with eta, and stops the run if a row is too old.

    Colocated rollouts run only while the trainer waits, so sampling of a prompt may begin later than it was issued. In
    the separate run at eta 2, tokens of age 2 are also masked.
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


def test_a_server_that_lies_about_its_version_stops_the_run(run_program: Callable[..., Any]) -> None:
    """From version 2 on, the server reports the next version; this is detected in step 3, or with the next rows that
    finish before a synchronisation.
    """
    run = broken(
        run_program, "version_ahead:2", SEPARATE, "offpolicy.staleness.eta=2", "trainer.total_training_steps=12"
    )
    said = r"StalenessError: sequence \S+ finished in step (\d+) and reports that version \1 .*newest .*eta=2"
    found = re.search(said, run.log)
    assert found, run.log[-3000:]
    assert 3 <= int(found[1]) <= 8
    assert [step["training/global_step"] for step in run.steps] == list(range(1, int(found[1])))


def test_eta_is_moved_to_where_the_sample_size_or_the_wait_is_met(run_program: Callable[..., Any]) -> None:
    """Eta starts at 0 and moves within 20 steps; each row is compared with the eta that was active when its prompt was
    issued.
    """
    target = 0.9
    steps = trained(
        run_program,
        SEPARATE,
        "correction=decoupled_ppo",
        "offpolicy.staleness.eta=0",
        f"offpolicy.staleness.adapt.ess={target}",
        "offpolicy.staleness.adapt.every=2",
        "trainer.total_training_steps=20",
    )
    etas = [step[f"{ROOT}/eta"] for step in steps]
    for number, step in enumerate(steps, 1):
        print(
            number,
            *(f"{name}={step[f'{ROOT}/{name}']:g}" for name in ("eta", "max", "issued", "waited_share")),
            f"ess={step['offpolicy/weight/ess']:.4f}",
        )
    assert etas[0] == 0
    assert max(etas) >= 1
    assert max(abs(after - before) for before, after in pairwise(etas)) <= 1
    assert all(step[f"{ROOT}/max"] <= max(etas) for step in steps)
    ess = mean(step["offpolicy/weight/ess"] for step in steps[-4:])
    # A single step may wait for a server that the machine keeps from working.
    waited = median(step[f"{ROOT}/waited_share"] for step in steps[-6:])
    assert waited < 0.05 or abs(ess - target) <= 0.05
