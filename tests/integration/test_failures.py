"""Runs that fail during training end soon, without help, and name the cause; their checkpoints can be resumed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.whole_runs import LIMIT, ROOT, broken

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("dies", "a worker of llm_server_manager has died"),
        ("hangs", "update_actor is stuck: it has taken"),
    ],
)
def test_a_driver_that_waits_for_ray_is_woken(run_program: Callable[..., Any], fault: str, cause: str) -> None:
    program = str(ROOT / "tests" / "support" / "watched_ray.py")
    finished = run_program([sys.executable, program, fault], limit=LIMIT, may_leave=True)
    assert not finished.timed_out
    assert finished.returncode == 1
    # The last thing that the driver says is the cause, not what an interrupted ray.get makes of it; lines that Ray
    # forwards from workers may come between.
    said = [line for line in finished.output.splitlines() if not re.match(r"(\x1b\[\d+m)?\(\w+ pid=", line)]
    assert re.search(rf"WatchdogError: {cause}.* Step 5, phase update_actor", said[-1])
    assert "in _update_actor" in finished.output  # the stacks


@pytest.mark.extended
def test_a_weight_sync_that_hangs_with_bypass_live_before_it(run_program: Callable[..., Any]) -> None:
    """With bypass, the loss reads mu as pi_old, and masks depend on the current policy."""
    stuck = "+offpolicy.watchdog.phase_timeouts.weight_sync=30"
    run = broken(run_program, "stop_rollout_engine:2", "correction=[bypass,trl/opsm]", stuck, limit=30.0)
    assert re.search(r"WatchdogError: weight_sync is stuck: .* Step 2, phase weight_sync", run.log)
    assert "update_weights" in run.log  # the stacks
    (step,) = run.steps
    assert step["offpolicy/live/proved"] == 1.0
    assert step["offpolicy/live/identical_share"] == 1.0
    assert step["offpolicy/rollout_ratio/max"] == 1.0
    # The engines' mismatch is in PPO's own ratio, which is not 1 even at the first of two gradient steps.
    assert step["offpolicy/ppo_ratio/std"] > 1e-3
    assert "actor/entropy" not in step  # verl logs it with the forward pass that pi_old would have taken


@pytest.mark.extended
def test_a_checkpoint_that_hangs_and_the_one_before(run_program: Callable[..., Any], tmp_path: Path) -> None:
    """The correction uses every batch-level constant: self-normalised weights, kept counts, baselines and shadows."""
    folder = tmp_path / "checkpoints"
    whole_batch = [
        "correction=[tis_token,gsm]",
        "correction.weight.normalize=true",
        "correction.masks.gsm={ratio: rollout, level: sequence, aggregate: geometric, lower: 0.998, upper: 1.002, "
        "when: any}",
        "correction.denominator=kept",
        "correction.baseline=exclude",
        "offpolicy.shadow=[opsm,paper/m2po]",
    ]
    saving = ["trainer.save_freq=1", f"trainer.default_local_dir={folder}", "trainer.max_actor_ckpt_to_keep=1"]
    stuck = "offpolicy.watchdog.phase_timeouts.checkpoint=30"
    run = broken(run_program, "hang_in_checkpoint:2", *whole_batch, stuck, *saving, limit=30.0)
    assert "WatchdogError: checkpoint is stuck" in run.log
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (folder / "global_step_2" / "actor").is_dir()
    assert run.steps
    for step in run.steps:
        _acts_on_the_whole_batch(step)

    # The run goes on at step 2, and at step 3 an agent loop is killed, for which no one waits.
    resumed = broken(run_program, "kill_agent_loop:3", *whole_batch, *saving, "trainer.resume_mode=auto")
    assert "the checkpoint of step 2 is incomplete; resuming from step 1" in resumed.log
    assert "resuming global_step_1 with the correction that it was trained with" in resumed.log
    assert [step["training/global_step"] for step in resumed.steps] == [2]
    assert re.search(r"WatchdogError: a worker of agent_loop_manager has died", resumed.log)


def _acts_on_the_whole_batch(step: dict[str, Any]) -> None:
    assert step["offpolicy/live/proved"] == 1.0
    # Exactly 1 over the batch, though each of its mini-batches has another mean.
    assert step["offpolicy/weight/mean"] == pytest.approx(1.0, abs=1e-6)
    assert step["offpolicy/raw_weight/mean"] != pytest.approx(1.0, abs=1e-6)
    # All rows are counted in these two; the rest of the 128 were kept.
    rejected = step["offpolicy/mask/gsm/masked_sequence_share"] * 128
    assert 0 < rejected < 128
    assert step["offpolicy/baseline/excluded_sequences"] == pytest.approx(rejected, abs=1e-6)
    assert step["offpolicy/baseline/silent_sequences"] >= rejected
    assert step["offpolicy/shadow/opsm/keep_token_share"] > 0.0
    assert step["offpolicy/shadow/paper/m2po/keep_token_share"] > 0.0


@pytest.mark.extended
@pytest.mark.parametrize(("sync", "steps"), [(1, 0), (3, 1)])
def test_an_engine_that_cannot_load_weights(run_program: Callable[..., Any], sync: int, steps: int) -> None:
    run = broken(run_program, f"failing_load:{sync}", "correction=tis_token", "offpolicy.watchdog.poll=5")
    told = r"WatchdogError: a worker of llm_server_manager has failed: rollout server 0 could not run update_weights"
    assert re.search(told + r".*KeyError: 'layers\.7\.unknown'", run.log), run.log[-3000:]
    assert len(run.steps) == steps


DEAD = r"WatchdogError: a worker of \w+ has died|ActorDiedError|EngineDeadError"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("log_probs_of_other_rows:2", "AlignmentError: rollout_log_probs belong to other sequences"),
        ("shift_log_probs:2", "AlignmentError: rollout_log_probs are off by one token"),
        ("lose_log_probs:2", "RolloutLogProbError: .*are missing"),
        ("zero_log_probs:2", "RolloutLogProbError: .*are missing"),
        ("kill_actor_worker:2", DEAD),
        ("kill_rollout_server:2", DEAD),
        ("kill_rollout_engine:2", DEAD),
    ],
)
def test_a_fault_ends_the_run_with_its_cause(run_program: Callable[..., Any], fault: str, cause: str) -> None:
    run = broken(run_program, fault, "correction=tis_token", "trainer.total_training_steps=6")
    assert re.search(cause, run.log), run.log[-3000:]
    assert 1 <= len(run.steps) <= 2
