"""Controls on the whole system: Ray, verl's V1 trainer, FSDP2 and vLLM, a few steps each, one run at a time."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 420.0  # seconds; a run takes about 100

pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(LIMIT) + 60)]


def train(run_program: Callable[..., Any], *overrides: str, **environment: str) -> tuple[Any, list[dict[str, Any]]]:
    """One quickstart with these Hydra overrides: how it finished, and the metrics of its steps."""
    finished = run_program(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), *overrides],
        limit=LIMIT,
        cwd=ROOT,
        VENV=os.environ.get("VENV") or sys.prefix,
        **environment,
    )
    steps: list[dict[str, Any]] = []
    if folder := re.search(r"everything goes to (\S+)", finished.output):
        metrics = ROOT / folder.group(1) / "metrics.jsonl"
        if metrics.is_file():
            records = [json.loads(line) for line in metrics.read_text().splitlines()]
            steps = [record["data"] for record in records if "actor/grad_norm" in record["data"]]
    return finished, steps


def test_negative_control_equal_engines_leave_nothing_to_correct(run_program: Callable[..., Any]) -> None:
    """float32 on both sides: KL below 1e-6 and weights 1 to 1e-5, with the correction proved live all the same."""
    finished, steps = train(
        run_program,
        "correction=[tis_token,gsm,opsm_trl]",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.dtype=float32",
    )
    assert finished.returncode == 0, finished.output[-3000:]
    assert len(steps) == 3
    for step in steps:
        assert abs(step["offpolicy/kl/k3"]) < 1e-6
        assert step["offpolicy/weight/std"] < 1e-5
        # Now and then a token is sampled whose probability float32 knows less well.
        assert step["offpolicy/weight/min"] == pytest.approx(1.0, abs=1e-4)
        assert step["offpolicy/weight/max"] == pytest.approx(1.0, abs=1e-4)
        assert step["offpolicy/mask/gsm/masked_sequence_share"] == 0.0
        assert step["offpolicy/live/proved"] == 1.0
    # Two gradient steps on each batch: the current policy moves away from pi_old, and the full ratio sees it.
    assert steps[0]["offpolicy/ppo_ratio/std"] > 1e-4


def test_positive_control_stale_rollouts_reach_the_cap(run_program: Callable[..., Any]) -> None:
    """colocate_async: every second batch was sampled by older weights; that shows, and the weights are capped."""
    finished, steps = train(
        run_program,
        "correction=tis_token",
        "trainer.total_training_steps=6",
        "trainer.v1.trainer_mode=colocate_async",
        "actor_rollout_ref.actor.optim.lr=3e-3",
    )
    assert finished.returncode == 0, finished.output[-3000:]
    staleness = [step["training/off_policy/trajectory_staleness/mean"] for step in steps]
    assert staleness == [0, 1, 0, 1, 0, 1]
    assert [step["offpolicy/staleness/mean"] for step in steps] == staleness
    fresh, stale = steps[::2], steps[1::2]
    for step in stale[:2]:
        assert step["offpolicy/kl/k3"] > 0.01
        assert step["offpolicy/weight/max"] == 2.0
        assert step["offpolicy/weight/truncated_share"] > 0.0
        assert step["offpolicy/weight/ess"] < 0.99
    for step in fresh:
        assert step["offpolicy/kl/k3"] < 0.01
        assert step["offpolicy/weight/max"] < 2.0
    assert all(math.isfinite(step["actor/grad_norm"]) for step in steps)


@pytest.mark.extended
def test_what_is_fixed_for_a_batch_travels_with_it(run_program: Callable[..., Any]) -> None:
    """Self-normalised weights, the count of what is kept, baselines without rejected siblings, and two shadows."""
    finished, steps = train(
        run_program,
        "correction=[tis_token,gsm]",
        "correction.weight.normalize=true",
        "correction.masks.gsm={ratio: rollout, level: sequence, aggregate: geometric, lower: 0.998, upper: 1.002, "
        "when: any}",
        "correction.denominator=kept",
        "correction.baseline=exclude",
        "offpolicy.shadow=[opsm,m2po]",
        "trainer.total_training_steps=2",
    )
    assert finished.returncode == 0, finished.output[-3000:]
    assert len(steps) == 2
    for step in steps:
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
        assert step["offpolicy/shadow/m2po/keep_token_share"] > 0.0


@pytest.mark.extended
def test_bypass_reaches_the_worker(run_program: Callable[..., Any]) -> None:
    """pi_old is mu where the loss reads it, without a forward pass for it, and masks see the current policy."""
    finished, steps = train(
        run_program,
        "correction=[bypass,opsm_trl]",
        "trainer.total_training_steps=2",
    )
    assert finished.returncode == 0, finished.output[-3000:]
    assert len(steps) == 2
    for step in steps:
        assert step["offpolicy/live/proved"] == 1.0
        assert step["offpolicy/live/identical_share"] == 1.0
        assert step["offpolicy/rollout_ratio/max"] == 1.0
        # The engines' mismatch is in PPO's own ratio, which is not 1 even at the first of two gradient steps.
        assert step["offpolicy/ppo_ratio/std"] > 1e-3
        assert "actor/entropy" not in step  # verl logs it with the forward pass that pi_old would have taken


def test_a_tampered_run_stops_at_the_first_update(run_program: Callable[..., Any]) -> None:
    """A module in the workers shifts mu by one token, as an off-by-one in a fork would; the run must end there."""
    finished, steps = train(
        run_program,
        "correction=tis_token",
        "trainer.total_training_steps=3",
        VERL_USE_EXTERNAL_MODULES="verl_patches.cpu,shift_mu",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    )
    assert finished.returncode not in (0, None)
    assert not finished.timed_out
    assert "the mu that the loss used is not the mu that the rollout sampled" in finished.output
    assert steps == []
