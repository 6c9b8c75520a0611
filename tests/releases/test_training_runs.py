"""Every release before the newest trains end to end: Ray, vLLM rollouts, weight synchronisation, and a live
correction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.whole_runs import train

COLOCATED = "trainer.v1.trainer_mode=colocate_async"
NUDGED = (
    *(f"offpolicy.extensions.{section}=tests.support.nudge:Nudge" for section in ("nudge", "sway")),
    *("+nudge.coef=0.001", "+sway.coef=0.002"),
)
LEGACY, EXTENDED = pytest.mark.verl("==0.7.1"), pytest.mark.extended
NEWER = pytest.mark.verl("==0.9.0")

pytestmark = [pytest.mark.verl("<0.9.1"), pytest.mark.slow]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="legacy", marks=LEGACY),
        pytest.param(NUDGED, id="extended", marks=[LEGACY, EXTENDED]),
        pytest.param(("trainer.use_legacy_worker_impl=disable",), id="engine", marks=[LEGACY, EXTENDED]),
        pytest.param((), id="v0", marks=pytest.mark.verl("==0.8.0")),
        pytest.param((), id="v1", marks=NEWER),
        pytest.param((COLOCATED,), id="colocate_async", marks=NEWER),
        pytest.param(("trainer.use_v1=false",), id="v0 next to v1", marks=NEWER),
    ],
)
def test_three_steps_with_the_correction_live(overrides: tuple[str, ...], run_program: Callable[..., Any]) -> None:
    run = train(run_program, "correction=tis_token", "trainer.total_training_steps=3", *overrides)
    assert run.returncode == 0, run.output[-4000:]
    assert "proved live" in run.output
    steps = re.findall(r"step (\d) of 3: reward [\d.]+, KL ([\d.e-]+)", run.output)
    assert [step for step, _ in steps] == ["1", "2", "3"]
    if COLOCATED in overrides:  # every second batch was sampled by the weights before the last update
        assert float(steps.pop(1)[1]) > 2e-3
    # Weights that were lost or garbled on their way to vLLM give 1e-2 and more, its bfloat16 about 1e-4.
    assert all(1e-6 < float(kl) < 2e-3 for _, kl in steps), steps


@pytest.mark.verl("==0.7.1")
@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_engine_leaves_the_second_forward_pass_out(dtype: str, run_program: Callable[..., Any]) -> None:
    """Hugging Face generates in the trainer's dtype and with its kernels; in bfloat16, it would be a
    different engine.
    """
    rollout = "actor_rollout_ref.rollout"
    keys = (f"{rollout}.dtype={dtype}", f"{rollout}.name=hf", f"{rollout}.log_prob_micro_batch_size_per_gpu=1")
    hf = {"VERL_USE_EXTERNAL_MODULES": "tests.support.hf_rollout"}
    run = train(run_program, "correction=same_engine", "trainer.total_training_steps=3", *keys, **hf)
    if dtype == "bfloat16":
        assert run.returncode == 1, run.output[-4000:]
        said = r"correction\.proximal=same_engine: \|mu - pi_old\| is [\d.e-]+ nats at step 1, row \d+"
        assert re.search(said, run.log)
        return
    assert run.returncode == 0, run.output[-4000:]
    assert "|mu - pi_old| is at most" in run.log
    assert [step["offpolicy/cost/proximal_forwards"] for step in run.steps] == [1.0, 0.0, 0.0]
    assert all(step["offpolicy/same_engine/largest_difference"] <= 1e-6 for step in run.steps)
