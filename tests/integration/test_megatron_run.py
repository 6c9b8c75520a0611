"""A whole GRPO run on verl's Megatron engine: Ray, the V1 trainer, vLLM, and two pipeline stages on gloo."""

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

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(int(LIMIT) + 60)]

TWO_STAGES = (
    "platform=cpu_megatron",
    "model_engine=megatron",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=24",
)


def test_a_whole_run_is_proved_live_on_the_last_stage(run_program: Callable[..., Any]) -> None:
    finished = run_program(
        [
            "bash",
            str(ROOT / "scripts" / "quickstart.sh"),
            *TWO_STAGES,
            "correction=[tis_token,gsm]",
            "trainer.total_training_steps=3",
        ],
        limit=LIMIT,
        cwd=ROOT,
        VENV=os.environ.get("VENV") or sys.prefix,
    )
    assert finished.returncode == 0, finished.output[-3000:]
    folder = re.search(r"everything goes to (\S+)", finished.output)
    assert folder, finished.output[-3000:]
    metrics = ROOT / folder.group(1) / "metrics.jsonl"
    assert metrics.is_file(), finished.output[-3000:]
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "actor/grad_norm" in record]
    assert len(steps) == 3, finished.output[-3000:]
    for step in steps:
        assert step["offpolicy/live/proved"] == 1.0
        # Each of the 16 x 8 rows reported once, though each passed through both stages.
        assert step["offpolicy/live/rows"] == 128
        assert step["offpolicy/live/gradient_error"] < 1e-4
        assert step["offpolicy/live/shift_error"] < 1e-4
        # Two engines in bfloat16, in step with each other: the weights reach vLLM from both stages.
        assert abs(step["offpolicy/kl/k3"]) < 1e-3
        assert step["offpolicy/weight/mean"] == pytest.approx(1.0, abs=0.01)
        assert step["offpolicy/weight/std"] < 0.1
        assert step["actor/grad_norm"] > 0.0
    # Two gradient steps on each batch: the current policy moves away from pi_old.
    assert steps[0]["offpolicy/ppo_ratio/std"] > 1e-4
