"""Weights are unbiased, shown by enumeration, and masks equal verl's trust regions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.corrections import TIS, run, spec
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

UNBOUND_TOKEN = TIS | {"upper": None}
UNBOUND_SEQUENCE = UNBOUND_TOKEN | {"level": "sequence"}


# Two tokens of three symbols: 9 sequences, so that every expectation is a finite sum in float64.

SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=2)))


def policy(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the first token (3,), and of the second given the first (3, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3)))  # type: ignore[return-value]


def log_probs(logits: tuple[Tensor, Tensor]) -> Tensor:
    """Log-probs of both tokens of each sequence, (9, 2)."""
    first, second = (x.log_softmax(-1) for x in logits)
    return torch.stack([first[SEQUENCES[:, 0]], second[SEQUENCES[:, 0], SEQUENCES[:, 1]]], dim=-1)


def enumerated_weights(kind: dict[str, object]) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of the 9 sequences under mu and pi_old, and the weights (9, 2)."""
    mu, old = log_probs(policy(0)), log_probs(policy(1))
    step = run(spec(kind), mu=mu, old=old, dtype=torch.float64)
    return mu.sum(-1).exp(), old.sum(-1).exp(), step.weight


def test_untruncated_sequence_weights_are_unbiased() -> None:
    """E_mu[prod rho f] = E_old[f], exactly, for any f of the sequence."""
    mu, old, weight = enumerated_weights(UNBOUND_SEQUENCE)
    assert mu.sum().item() == pytest.approx(1.0, abs=1e-12)
    rewards = torch.arange(9, dtype=torch.float64).square() - 7.0
    assert (mu * weight[:, 0] * rewards).sum().item() == pytest.approx((old * rewards).sum().item(), abs=1e-12)
    assert (mu * weight[:, 1]).sum().item() == pytest.approx(1.0, abs=1e-12)


def score_expectation(kind: dict[str, object]) -> Tensor:
    """E_mu[w_t grad log pi_old,t] summed over t, by enumeration: one number per logit, (12,)."""
    logits = tuple(x.requires_grad_() for x in policy(1))
    old, mu = log_probs(logits), log_probs(policy(0))  # type: ignore[arg-type]
    weight = run(spec(kind), mu=mu, old=old.detach(), dtype=torch.float64).weight
    gradients = torch.autograd.grad((mu.sum(-1).exp()[:, None] * weight * old).sum(), logits)
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_untruncated_token_weights_leave_baselines_unbiased() -> None:
    """E_mu[rho_t grad log pi_t] = 0 exactly."""
    assert score_expectation(UNBOUND_TOKEN).abs().max().item() < 1e-14


@pytest.mark.parametrize("kind", [TIS | {"upper": 1.2}, TIS | {"lower": 0.8, "upper": None}, None])
def test_truncation_and_no_weight_break_that(kind: dict[str, object]) -> None:
    assert score_expectation(kind).abs().max().item() > 1e-2


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_binary_kl_mask_is_the_trust_region_of_dppo(advantage: float) -> None:
    """verl's dppo_kl drops tokens with KL(old, pi) > 0.05 if p has moved away from p_old in the direction of A; so does
    our mask.
    """
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(1, 400, generator=generator, dtype=torch.float64).log()
    pi = torch.rand(1, 400, generator=generator, dtype=torch.float64).log()
    sizes: dict[str, Any] = dict(ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, rollout_n=1)
    clip = dict(clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05)
    loss, _ = get_policy_loss_fn("dppo_kl")(
        old_log_prob=old,
        log_prob=(leaf := pi.clone().requires_grad_()),
        advantages=torch.full_like(old, advantage),
        response_mask=torch.ones_like(old, dtype=torch.bool),
        loss_agg_mode="token-sum",
        config=FSDPActorConfig(strategy="fsdp2", use_torch_compile=False, **sizes, **clip),
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
