"""Quickstart runs for tests: Ray, verl's trainer, FSDP2 or Megatron, and vLLM, one run at a time."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.offpolicy.fault_tolerance.watchdog import GRACE, PATIENCE
from tests.support.paths import ROOT

SOON = 10.0 + PATIENCE + GRACE + 300.0
"""Limit in seconds: the watchdog looks every 10 s and gives the run time to unwind; then Ray and the quickstart end."""
INJECTED = {
    "VERL_USE_EXTERNAL_MODULES": "verl_patches.cpu,inject",
    "PYTHONPATH": str(ROOT / "scripts" / "evidence" / "injected_faults"),
}
"""Environment in which OFFPOLICY_INJECT is active."""
UNSCORED = ("trainer.val_before_train=false", "trainer.test_freq=-1")
LIMIT = 1200.0
"""Seconds after which a run counts as hanging; on an idle machine, most runs take 80 to 150 s."""


@dataclass(frozen=True)
class Trained:
    """A run that has ended.

    Attributes:
        returncode: of the quickstart; 1: training failed by itself.
        output: what it printed.
        log: the whole of the training's log.
        steps: the metrics of every step that was logged.
        ended: when its last process was gone, seconds since the epoch.
    """

    returncode: int
    output: str
    log: str
    steps: list[dict[str, Any]]
    ended: float = 0.0

    @property
    def since_fault(self) -> float:
        """Seconds from the first fault until the last process of the run has ended."""
        told = re.search(r"fault: .* at ([\d.]+)", self.log)
        assert told, self.log[-3000:]
        return self.ended - float(told[1])


def train(run_program: Callable[..., Any], *overrides: str, **environment: str) -> Trained:
    """Run one quickstart with these Hydra overrides and without validation; it must end without help within
    ``LIMIT``.
    """
    finished = run_program(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), *UNSCORED, *overrides],
        limit=LIMIT,
        cwd=ROOT,
        VENV=os.environ.get("VENV") or sys.prefix,
        **environment,
    )
    ended = time.time()
    assert not finished.timed_out, finished.output[-3000:]
    found = re.search(r"everything goes to (\S+)", finished.output)
    assert found, finished.output[-3000:]
    folder = ROOT / found.group(1)
    metrics, log = folder / "metrics.jsonl", folder / "train.log"
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    steps = [record for record in records if "actor/grad_norm" in record]
    return Trained(finished.returncode, finished.output, log.read_text() if log.is_file() else "", steps, ended)


def build_launch(made: Mapping[str, Path], folder: Path, **changes: object) -> list[str]:
    """Build the overrides of a launch of verl's or a user's own program; ``made`` has the quickstart's data
    and model.
    """
    values: dict[str, object] = {
        "data.train_files": made["data"] / "train.parquet",
        "data.val_files": made["data"] / "heldout.parquet",
        "actor_rollout_ref.model.path": made["model"],
        "reward.custom_reward_function.path": ROOT / "scripts" / "quickstart" / "reward.py",
        "hydra.run.dir": folder / "hydra",
        "data.max_prompt_length": 64,
        "data.max_response_length": 10,
        "data.seed": 1,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.actor.optim.lr": 3e-4,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.dtype": "bfloat16",
        "actor_rollout_ref.rollout.max_model_len": 128,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[console]",
        "trainer.total_epochs": 1000,
    }
    return [f"{key}={value}" for key, value in (values | changes).items()]


def trained(run_program: Callable[..., Any], *overrides: str) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run that must succeed."""
    run = train(run_program, *overrides)
    assert run.returncode == 0, run.output[-3000:]
    return run.steps


def broken(run_program: Callable[..., Any], fault: str, *overrides: str, limit: float = 0.0) -> Trained:
    """Run with a fault of ``faults.py``; the run must end soon, with the error of its training.

    Args:
        limit: seconds that the phase in which it hangs may take.
    """
    run = train(
        run_program,
        *overrides,
        OFFPOLICY_FAULT=fault,
        VERL_USE_EXTERNAL_MODULES="verl_patches.cpu,tests.support.faults",
        PYTHONPATH=str(ROOT),
    )
    # 5 is the limit of the quickstart itself.
    assert run.returncode == 1, run.output[-3000:]
    assert run.since_fault < limit + SOON
    return run
