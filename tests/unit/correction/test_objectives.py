"""Masks next to objectives of verl's that have a ratio or a mask of their own: GSPO and DPPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.corrections import run, spec
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig


def config(**changes: Any) -> FSDPActorConfig:
    values: dict[str, Any] = dict(
        strategy="fsdp2", ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, rollout_n=1, use_torch_compile=False
    )
    return FSDPActorConfig(**(values | changes))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_binary_kl_mask_is_the_trust_region_of_dppo(advantage: float) -> None:
    """verl's dppo_kl drops KL(old, pi) > 0.05 where p has moved away from p_old by the sign of A; so does our mask."""
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(1, 400, generator=generator, dtype=torch.float64).log()
    pi = torch.rand(1, 400, generator=generator, dtype=torch.float64).log()
    loss, _ = get_policy_loss_fn("dppo_kl")(
        old_log_prob=old,
        log_prob=(leaf := pi.clone().requires_grad_()),
        advantages=torch.full_like(old, advantage),
        response_mask=torch.ones_like(old, dtype=torch.bool),
        loss_agg_mode="token-sum",
        config=config(clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05),
        rollout_is_weights=None,
    )
    kept = torch.autograd.grad(loss, leaf)[0] != 0
    mask: dict[str, Any] = dict(ratio="ppo", level="token", aggregate="binary_kl_forward", lower=None, upper=0.05)
    step = run(
        spec(dppo=mask | dict(when="outward", sign="token")),
        mu=old,
        old=old,
        pi=pi,
        advantages=advantage,
        dtype=torch.float64,
    )
    assert torch.equal(step.keep, kept)
    assert 100 < int(kept.sum()) < 300
