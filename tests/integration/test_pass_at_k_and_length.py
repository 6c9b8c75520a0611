"""pass@k training, its budgets, and a length penalty in whole runs: each is proved live, and draws continue after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.whole_runs import train, trained

pytestmark = [pytest.mark.slow, pytest.mark.extended]

V0_OF_MANY = pytest.param(["trainer.use_v1=false"], id="v0", marks=pytest.mark.verl(">=0.9"))
FEW = "data.train_max_samples=32"
"""Two batches, so that prompts are drawn again."""


@pytest.mark.verl(">=0.9")
def test_group_sizes_fill_each_step_without_padding(run_program: Callable[..., Any]) -> None:
    budget = ("pass_at_k=loo", "pass_at_k.k=2", "pass_at_k.budget.mode=group_size")
    steps = trained(run_program, *budget, "trainer.total_training_steps=4", FEW)
    assert [step["pass_at_k/budget/rows"] for step in steps] == [128.0] * 4
    assert [step["pass_at_k/budget/padding_rows"] for step in steps] == [0.0] * 4
    assert steps[-1]["pass_at_k/budget/spread"] > 0


@pytest.mark.parametrize("trainer", [pytest.param([], id="newest trainer"), V0_OF_MANY])
def test_draws_of_prompts_go_on_after_a_resume(
    trainer: list[str], run_program: Callable[..., Any], tmp_path: Path
) -> None:
    budget = ("pass_at_k=validation", "pass_at_k.budget.mode=upsample", FEW, *trainer)
    kept = ("actor_rollout_ref.rollout.val_kwargs.temperature=1.0", "actor_rollout_ref.rollout.val_kwargs.n=16")
    folder = f"trainer.default_local_dir={tmp_path}"
    first = trained(run_program, *budget, *kept, folder, "trainer.total_training_steps=2", "trainer.save_freq=2")
    resumed = (folder, "trainer.resume_mode=auto", "trainer.total_training_steps=4")
    later = trained(run_program, *budget, *kept, *resumed)
    assert [step["training/global_step"] for step in later] == [3, 4]
    assert first[0]["pass_at_k/budget/proved"] == 0.0
    assert later[-1]["pass_at_k/budget/proved"] == 1.0
    seen = [step["pass_at_k/budget/seen_prompts"] for step in (*first, *later)]
    assert seen == sorted(seen)
    assert seen[0] == 16.0
    assert later[-1]["pass_at_k/budget/effective_share"] < 1.0


@pytest.mark.verl("==0.9.1")
def test_answers_of_free_length_are_priced_and_shown(run_program: Callable[..., Any]) -> None:
    price = ("length_penalty=uniform", "length_penalty.place=before")
    run = train(run_program, *price, "trainer.total_training_steps=4", TASK="free_length")
    assert run.returncode == 0, run.output[-3000:]
    assert "length penalty LIVE on" in run.log
    assert len({step["response_length/mean"] for step in run.steps}) == 4
    assert all(step["critic/score/mean"] > 0.2 for step in run.steps)
    assert "length of answers:" in run.output
