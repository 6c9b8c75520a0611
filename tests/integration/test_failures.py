"""Runs that break while they train end by themselves, soon, with the cause; what they had saved can be resumed."""

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
SUPPORT = ROOT / "tests" / "support"
QUICKSTART = str(ROOT / "scripts" / "quickstart.sh")
LIMIT = 420.0  # seconds; a run takes about 150

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * int(LIMIT) + 60)]


def broken(run_program: Callable[..., Any], fault: str, *overrides: str) -> Any:
    """A quickstart with a fault of ``faults.py`` in it; it must end by itself, and not well."""
    finished = run_program(
        ["bash", QUICKSTART, "correction=tis_token", "trainer.val_before_train=false", *overrides],
        limit=LIMIT,
        cwd=ROOT,
        VENV=os.environ.get("VENV") or sys.prefix,
        OFFPOLICY_FAULT=fault,
        VERL_USE_EXTERNAL_MODULES="verl_patches.cpu,faults",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(SUPPORT)]),
    )
    assert not finished.timed_out
    assert finished.returncode == 1, finished.output[-3000:]  # training failed; 5 and 6 are limits of the quickstart
    return finished


def log_of(finished: Any) -> str:
    """The whole of the training's log."""
    folder = re.search(r"everything goes to (\S+)", finished.output)
    assert folder
    return (ROOT / folder.group(1) / "train.log").read_text()


def steps_of(finished: Any) -> list[dict[str, Any]]:
    folder = re.search(r"everything goes to (\S+)", finished.output)
    assert folder
    metrics = ROOT / folder.group(1) / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    return [record["data"] for record in records if "actor/grad_norm" in record["data"]]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("dies", "a worker of llm_server_manager has died"),
        ("hangs", "update_actor is stuck: it has taken"),
    ],
)
def test_a_driver_that_waits_for_ray_is_woken(run_program: Callable[..., Any], fault: str, cause: str) -> None:
    finished = run_program([sys.executable, str(SUPPORT / "watched_ray.py"), fault], limit=120.0, may_leave=True)
    assert not finished.timed_out
    assert finished.returncode == 1
    # The last thing that the driver says is the cause, not what an interrupted ray.get makes of it; lines that Ray
    # forwards from workers may come between.
    said = [line for line in finished.output.splitlines() if not re.match(r"(\x1b\[\d+m)?\(\w+ pid=", line)]
    assert re.search(rf"WatchdogError: {cause}.* Step 5, phase update_actor", said[-1])
    assert "in _update_actor" in finished.output  # the stacks


@pytest.mark.extended
def test_a_weight_sync_that_hangs(run_program: Callable[..., Any]) -> None:
    finished = broken(run_program, "stop_rollout_engine:1", "offpolicy.watchdog.step_timeout=40")
    log = log_of(finished)
    assert re.search(r"WatchdogError: weight_sync is stuck: .* Step 1, phase weight_sync", log)
    assert "update_weights" in log  # the stacks
    assert steps_of(finished) == []


@pytest.mark.extended
def test_a_checkpoint_that_hangs_and_the_one_before(run_program: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saving = ["trainer.save_freq=1", f"trainer.default_local_dir={folder}", "trainer.max_actor_ckpt_to_keep=1"]
    finished = broken(run_program, "hang_in_checkpoint:2", "offpolicy.watchdog.phase_timeouts.checkpoint=40", *saving)
    assert "WatchdogError: checkpoint is stuck" in log_of(finished)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (folder / "global_step_2" / "actor").is_dir()

    # The run goes on at step 2, and at step 3 an agent loop is killed, for which nobody waits.
    resumed = broken(run_program, "kill_agent_loop:3", *saving, "trainer.resume_mode=auto")
    log = log_of(resumed)
    assert "the checkpoint of step 2 was cut short; resuming step 1" in log
    assert "resuming global_step_1 with the correction that it was trained with" in log
    assert [step["training/global_step"] for step in steps_of(resumed)] == [2]
    assert re.search(r"WatchdogError: a worker of agent_loop_manager has died", log)


@pytest.mark.extended
def test_log_probs_of_other_rows(run_program: Callable[..., Any]) -> None:
    finished = broken(run_program, "log_probs_of_other_rows:2", "trainer.total_training_steps=6")
    assert "AlignmentError: rollout_log_probs are those of other rows" in log_of(finished)
    assert 1 <= len(steps_of(finished)) <= 2
