"""Healthy whole runs of all kinds: no check stops them, and each is proved live repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.whole_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]

STEPS = 5
SEPARATE, COLOCATED, V0 = "+mode=separate_async_cpu", "trainer.v1.trainer_mode=colocate_async", "trainer.use_v1=false"
KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64")
LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")
DYNAMIC = (
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=512",
)
TWO_GPUS = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=24")
PROOFS = "offpolicy.prove_every=2"
EXTENSIONS = ("ess_lr", "length_penalty", "pass_at_k", "optimal_baseline", "turn_credit", "process_reward", "opd")
RUNS: dict[str, tuple[str, ...]] = {
    "the quickstart's": (),
    "with KL": KL,
    "V0 with KL": (V0, *KL),
    "kept denominator": ("correction=[tis_token,gsm]", "correction.denominator=kept"),
    "excluded baseline": ("correction=[tis_token,gsm]", "correction.baseline=exclude"),
    "decoupled PPO": ("correction=decoupled_ppo",),
    "mu for pi_old": ("correction=bypass",),
    "IcePop": ("correction=icepop",),
    "the batch's cut": ("correction=paper/m2po",),
    "epochs and dynamic batches": ("actor_rollout_ref.actor.ppo_epochs=2", *DYNAMIC),
    # 105 rows, which verl pads to 112: one rank has 53 of them and the other 52.
    "uneven ranks": (
        *TWO_GPUS,
        "data.train_batch_size=15",
        "actor_rollout_ref.rollout.n=7",
        *DYNAMIC,
    ),
    "Megatron": (
        "platform=cpu_megatron",
        "model_engine=megatron",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        "correction=[tis_token,gsm]",
        *TWO_GPUS,
    ),
    "colocated": (COLOCATED, "offpolicy.staleness.eta=1"),
    "too old: mask": (SEPARATE, "offpolicy.staleness.eta=1", "offpolicy.staleness.too_old=mask"),
    "too old: refresh": (SEPARATE, "offpolicy.staleness.eta=1", "offpolicy.staleness.too_old=refresh"),
    "too old: wait": (SEPARATE, "offpolicy.staleness.eta=1", "offpolicy.staleness.too_old=wait"),
    "too old: drop": (SEPARATE, "offpolicy.staleness.eta=1", "offpolicy.staleness.too_old=drop"),
    "LoRA as adapter": LORA,
    "LoRA merged": (*LORA, "actor_rollout_ref.model.lora.merge=true"),
    "routing replay": ("model=moe", "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3"),
    "support replay": ("actor_rollout_ref.rollout.top_p=0.9", "correction.support=engine"),
    "length penalty and pass@k": ("length_penalty=group", "pass_at_k=loo"),
    "optimal baseline and learning rate": ("optimal_baseline=leave_one_out", "ess_lr=sqrt"),
    "process rewards": ("process_reward=prefix_value",),
    "process rewards, separate": ("process_reward=prefix_value", SEPARATE),
    "distillation": ("opd=advantage",),
}


@pytest.mark.parametrize("kind", RUNS)
def test_no_check_stops_it(kind: str, run_program: Callable[..., Any]) -> None:
    steps = trained(run_program, *RUNS[kind], f"trainer.total_training_steps={STEPS}", PROOFS)
    check_healthy(steps, range(1, STEPS + 1))


def test_no_check_stops_a_resumed_run(run_program: Callable[..., Any], tmp_path: Path) -> None:
    kept = (f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "offpolicy.delivery.probe=1", PROOFS)
    begun = trained(run_program, *kept, "trainer.total_training_steps=3", "trainer.save_freq=3")
    check_healthy(begun, range(1, 4))
    resumed = trained(run_program, *kept, f"trainer.total_training_steps={STEPS}", "trainer.resume_mode=auto")
    check_healthy(resumed, range(4, STEPS + 1))


def check_healthy(steps: Sequence[Mapping[str, float]], expected: Iterable[int]) -> None:
    assert [step["training/global_step"] for step in steps] == [*expected]
    assert {step["offpolicy/live/proved"] for step in steps} == {1.0}
    last = {
        name.removeprefix("offpolicy/live/"): value for name, value in steps[-1].items() if "offpolicy/live/" in name
    }
    assert last["delivery"] == last["own_rows"] == last["factor"] == last["denominators"] == 1.0, last
    sections = [value for name, value in last.items() if name in EXTENSIONS]
    assert set(sections) <= {1.0}, last
    # A seal is 12 bytes, and the columns of a correction have at most 96 a row.
    assert 3.0 <= last["sealed"] <= (8.0 if not sections else 16.0), last
