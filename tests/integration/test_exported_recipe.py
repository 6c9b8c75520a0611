"""The exported recipe trains with a live correction on a CPU, and stops if workers use another loss."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.quickstart.options import build_child_environment
from tests.integration.test_programs import METRIC, STEP
from tests.support.paths import ROOT
from tests.support.whole_runs import build_launch

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

STEPS, LIMIT = 2, 900.0
KEYS = {
    "data.train_batch_size": 16,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "trainer.total_training_steps": STEPS,
}
"""Mini-batches have 8 prompts, so the second update of a step is off policy."""


@pytest.mark.parametrize("faulty", [False, True], ids=["live", "another-loss"])
def test_it_trains_or_stops(
    faulty: bool, run_program: Callable[..., Any], made: dict[str, Path], tmp_path: Path
) -> None:
    collection = tmp_path / "recipe"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "export_recipe.py"), str(collection)], check=True)
    if faulty:  # a trainer that never hands its loss over
        main = collection / "offpolicy_correction" / "main_offpolicy_correction.py"
        main.write_text(re.sub(r"        self\.actor_rollout_wg\.set_loss_fn.*\n", "", main.read_text()))
    finished = run_program(
        [
            *(sys.executable, "-m", "recipe.offpolicy_correction.main_offpolicy_correction", "+platform=cpu"),
            *("correction=[tis_token,gsm,opsm]", "correction.masks.opsm.delta=0.1"),
            *build_launch(made, tmp_path, **KEYS),
        ],
        limit=LIMIT,
        may_leave=True,  # what verl itself does not remove is removed here
        cwd=tmp_path,
        **build_child_environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"}, "cpu", ROOT),
    )
    assert not finished.timed_out, finished.output[-3000:]
    steps = [dict(METRIC.findall(line)) for line in STEP.findall(finished.output)]
    if faulty:
        assert finished.returncode != 0
        assert "NotLive" in finished.output, finished.output[-3000:]
        assert not steps
        return
    assert finished.returncode == 0, finished.output[-3000:]
    assert len(steps) == STEPS
    for step in steps:
        assert float(step["offpolicy/live/tokens"]) > 0
        assert 0 < float(step["offpolicy/k3"]) < 0.05
        assert 0 < float(step["offpolicy/keep"]) <= 1
        assert 0 < float(step["offpolicy/weight/ess"]) <= 1
