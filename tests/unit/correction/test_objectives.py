"""Masks next to objectives of verl's that have a ratio or a mask of their own: GSPO and DPPO."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.corrections import band, run, spec
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
OLD = torch.tensor([[-1.0, -0.5, -2.0, -1.5], [-0.7, -1.2, -0.9, 0.0]], dtype=torch.float64)
MU = OLD - torch.tensor([[0.1, 0.0, 1.5, -0.1], [0.0, 0.05, -0.05, 0.0]], dtype=torch.float64)
DRIFT = torch.tensor([[0.05, -0.02, 0.1, 0.01], [-0.1, 0.15, 0.02, 0.0]], dtype=torch.float64)


def config(**changes: Any) -> FSDPActorConfig:
    values: dict[str, Any] = dict(
        strategy="fsdp2", ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, rollout_n=1, use_torch_compile=False
    )
    return FSDPActorConfig(**(values | changes))


def gradient(
    loss_mode: str,
    pi: Tensor,
    factor: Tensor | None = None,
    mask: Tensor = MASK,
    advantage: float = 1.0,
    **changes: Any,
) -> Tensor:
    """Of verl's loss at the log-probs, as the sum over tokens."""
    leaf = pi.clone().requires_grad_()
    loss, _ = get_policy_loss_fn(loss_mode)(
        old_log_prob=OLD,
        log_prob=leaf,
        advantages=torch.full_like(OLD, advantage),
        response_mask=mask,
        loss_agg_mode="token-sum",
        config=config(**changes),
        rollout_is_weights=factor,
    )
    return torch.autograd.grad(loss, leaf)[0]


def icepop() -> Tensor:
    step = run(spec(icepop=band(0.5, 2.0, level="token", aggregate="product")), mu=MU, old=OLD, mask=MASK)
    assert step.keep.tolist() == [[True, True, False, True], [True, True, True, False]]
    return (step.weight * step.keep).double()


def test_a_mask_leaves_gspos_own_ratio_alone() -> None:
    """GSPO's ratio is a mean over the row. Rejecting a token by the response mask moves it for all the others."""
    pi, factor = OLD + DRIFT, icepop()
    plain = gradient("gspo", pi, clip_ratio_low=0.5, clip_ratio_high=0.5)
    torch.testing.assert_close(
        gradient("gspo", pi, factor, clip_ratio_low=0.5, clip_ratio_high=0.5), plain * factor, rtol=1e-12, atol=0
    )
    assert plain[0, 0].item() == pytest.approx(-math.exp(DRIFT[0].mean().item()), rel=1e-12)
    by_response_mask = gradient("gspo", pi, mask=factor.bool(), clip_ratio_low=0.5, clip_ratio_high=0.5)
    assert (by_response_mask - plain * factor).abs().max() > 0.01


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
