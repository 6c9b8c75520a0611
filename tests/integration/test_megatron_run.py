"""A whole GRPO run on verl's Megatron engine: Ray, the V1 trainer, vLLM, and two pipeline stages on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.whole_runs import trained

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.slow, pytest.mark.extended]

TWO_STAGES = (
    "platform=cpu_megatron",
    "model_engine=megatron",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=24",
)


def test_a_whole_run_is_proved_live_on_the_last_stage(run_program: Callable[..., Any]) -> None:
    steps = trained(run_program, *TWO_STAGES, "correction=[tis_token,gsm]", "trainer.total_training_steps=3")
    assert len(steps) == 3
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
