"""The exported recipe trains live on a CPU, and stops where workers use another loss."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.quickstart.options import build_child_environment
from scripts.quickstart.prepare import folder
from scripts.quickstart.run import CACHE
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

STEPS, LIMIT = 2, 900.0
METRIC = re.compile(r"(offpolicy/[\w/]+):(?:np\.float\d+\()?(-?\d[\d.]*(?:e[-+]?\d+)?)")
KEYS = {
    "data.max_prompt_length": 64,
    "data.max_response_length": 10,
    "data.seed": 1,
    "data.train_batch_size": 16,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,  # the second update of a step is off policy
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
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
    "trainer.total_training_steps": STEPS,
}


@pytest.mark.parametrize("faulty", [False, True], ids=["live", "another-loss"])
def test_it_trains_or_stops(faulty: bool, run_program: Callable[..., Any], tmp_path: Path) -> None:
    prepare = [sys.executable, "-m", "scripts.quickstart.prepare", "--cache", str(CACHE), "data", "model"]
    subprocess.run(prepare, cwd=ROOT, check=True, timeout=LIMIT)
    collection = tmp_path / "recipe"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "export_recipe.py"), str(collection)], check=True)
    if faulty:  # a trainer that never hands its loss over
        main = collection / "offpolicy_correction" / "main_offpolicy_correction.py"
        main.write_text(re.sub(r"        self\.actor_rollout_wg\.set_loss_fn.*\n", "", main.read_text()))
    data = folder(CACHE, "data")
    overrides = KEYS | {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "heldout.parquet",
        "actor_rollout_ref.model.path": folder(CACHE, "model"),
        "reward.custom_reward_function.path": ROOT / "scripts" / "quickstart" / "reward.py",
        "hydra.run.dir": tmp_path / "hydra",
    }
    finished = run_program(
        [
            *(sys.executable, "-m", "recipe.offpolicy_correction.main_offpolicy_correction", "+platform=cpu"),
            *("correction=[tis_token,gsm,opsm]", "correction.masks.opsm.delta=0.1"),
            *(f"{key}={value}" for key, value in overrides.items()),
        ],
        limit=LIMIT,
        may_leave=True,  # what verl itself does not remove is removed here
        cwd=tmp_path,
        **build_child_environment({"PYTHONPATH": f"{tmp_path}:{ROOT}"}, "cpu", ROOT),
    )
    assert not finished.timed_out, finished.output[-3000:]
    steps = [dict(METRIC.findall(line)) for line in re.findall(r"step:\d+ - (.*)", finished.output)]
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
