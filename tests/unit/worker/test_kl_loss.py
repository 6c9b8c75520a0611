"""The KL loss with its clipped ratio, by hand and compared with verl's own KL loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.read_parts import read_kl_weight
from recipe.offpolicy.worker.loss import OffPolicyLoss
from recipe.offpolicy.worker.metrics import METRIC_KEY
from recipe.offpolicy.worker.terms import choose_surrogate, compute_clipped_kl, compute_weighted_kl, replace_kl
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric


def gradient(pi: Tensor, old: Tensor, ref: Tensor, kind: str, lower: float = 0.8, upper: float = 1.2) -> Tensor:
    leaf = pi.clone().requires_grad_()
    compute_clipped_kl(leaf, old, ref, kind=kind, lower=lower, upper=upper).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("kind", ["k2", "mse", "k3", "low_var_kl", "k3+", "k1+", "abs"])
def test_at_ratio_one_its_gradient_is_verls(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pi, ref = (-torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)).unbind()
    leaf = pi.clone().requires_grad_()
    kl_penalty(leaf, ref, kind).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(gradient(pi, pi, ref, kind), leaf.grad, rtol=1e-12, atol=1e-12)


def test_it_is_the_off_policy_gradient_of_the_kl() -> None:
    """By enumeration: E_old[ratio x slope x score] with k2 is the gradient of KL(pi, ref); verl's is not."""
    logits = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.2, -0.3], dtype=torch.float64).log_softmax(-1)
    ref = torch.tensor([-0.2, 0.1, 0.5], dtype=torch.float64).log_softmax(-1)

    log_pi = logits.log_softmax(-1)
    exact = torch.autograd.grad((log_pi.exp() * (log_pi - ref)).sum(), logits)[0]

    log_pi = logits.log_softmax(-1)
    surrogate = compute_clipped_kl(log_pi[None], old[None], ref[None], kind="k2", lower=1e-6, upper=1e6)[0]
    ours = torch.autograd.grad((old.exp() * surrogate).sum(), logits)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)

    log_pi = logits.log_softmax(-1)
    verls = torch.autograd.grad((old.exp() * kl_penalty(log_pi, ref, "k2")).sum(), logits)[0]
    assert (verls - exact).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["k1", "kl", "k3", "low_var_kl"])
def test_weighted_it_is_the_reverse_kl_and_its_gradient(kind: str) -> None:
    """By enumeration over the sampling policy, for both policies that it may be; with truncation, it is neither."""
    logits = torch.tensor([0.3, -0.4, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([0.0, 0.2, -0.3, -0.5], dtype=torch.float64).log_softmax(-1)
    ref = torch.tensor([-0.2, 0.1, 0.5, 0.4], dtype=torch.float64).log_softmax(-1)
    log_pi = logits.log_softmax(-1)
    exact = (log_pi.exp() * (log_pi - ref)).sum()

    def expectation(upper: float | None) -> Tensor:
        terms = compute_weighted_kl(logits.log_softmax(-1)[None], sampled[None], ref[None], kind=kind, upper=upper)[0]
        return (sampled.exp() * terms).sum()

    torch.testing.assert_close(expectation(None), exact, rtol=1e-12, atol=1e-12)
    (demanded,) = torch.autograd.grad(exact, logits)
    (found,) = torch.autograd.grad(expectation(None), logits)
    torch.testing.assert_close(found, demanded, rtol=1e-12, atol=1e-12)
    (bound,) = torch.autograd.grad(expectation(1.05), logits)
    assert (bound - demanded).abs().max() > 0.01


def test_the_ratio_says_which_policy_sampled() -> None:
    """log pi / pi_old = 1 and log pi / mu = 2, k1 = 1: e and e^2."""
    pi = torch.zeros(1, 1)
    policies = (pi, pi - 1, pi - 2, pi - 1, "k1")
    for ratio, expected in (("ppo", math.e), ("full", math.e**2)):
        weight = read_kl_weight({"ratio": ratio, "upper": None})
        surrogate = choose_surrogate(CorrectionSpec(kl_weight=weight))
        assert surrogate is not None
        assert surrogate(*policies).item() == pytest.approx(expected)
    assert choose_surrogate(CorrectionSpec()) is None


@dataclass
class ActorConfig:
    """The fields of verl's config that are read."""

    use_kl_loss: bool = True
    kl_loss_type: str = "k2"
    kl_loss_coef: float = 0.1
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None


def test_it_takes_the_place_of_verls_own_term() -> None:
    """Slopes 0.5 and -0.5: 0.5, and max(1.5 x -0.5, 1.2 x -0.5) = -0.6 beyond the clip; the mini-batch has 4 tokens."""
    asked: list[Any] = []

    def base_loss(config: ActorConfig, model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        asked.append((config.use_kl_loss, dp_group))
        return torch.tensor(3.0), {"actor/pg_loss": Metric(value=3.0, aggregation=AggregationType.SUM)}

    pi = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    columns = {"response_mask": torch.ones(1, 2), "old_log_probs": torch.tensor([[-1.0, -1.0 - math.log(1.5)]])}
    columns |= {"ref_log_prob": torch.tensor([[-1.5, -0.5]]), "rollout_log_probs": torch.zeros(1, 2)}
    data = TensorDict(columns, batch_size=1)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=4, global_batch_size=1)
    surrogate = choose_surrogate(CorrectionSpec(kl_clip=(0.8, 1.2)))
    assert surrogate is not None
    loss, metrics = replace_kl(base_loss, ActorConfig(), surrogate)({"log_probs": pi}, data, "group")
    assert asked == [(False, "group")]
    assert loss.item() == pytest.approx(3.0 + 0.1 * (0.5 - 0.6) / 4)
    assert metrics["kl_loss"].aggregate() == pytest.approx(0.25 / 4)  # the KL itself, 0.125 a token
    (slope,) = torch.autograd.grad(loss, pi)
    assert slope[0].tolist() == pytest.approx([0.1 * 0.5 / 4, 0.0])


def with_policy_term(
    config: ActorConfig, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """-sum of pi / pi_old x advantage x weight."""
    ratio = (model_output["log_probs"] - data["old_log_probs"]).exp()
    loss = -(ratio * data["advantages"] * data["rollout_is_weights"]).sum()
    return loss, {"actor/pg_loss": Metric(value=loss.detach(), aggregation=AggregationType.SUM)}


@pytest.mark.parametrize(
    "term",
    [
        {"kl_weight": {"ratio": "full", "upper": None}},
        {"kl_weight": {"ratio": "ppo", "upper": None}},
        {"kl_clip": {"lower": 0.5, "upper": 2.0}},
    ],
)
def test_where_mu_is_pi_old_and_unknown_no_ratio_is_made_up(term: dict[str, Any]) -> None:
    """The ratio is 1 at the second token: k2 has the slope 0.5, weighted (k2 + its slope) = 0.125 + 0.5; two tokens."""
    spec = CorrectionSpec.from_mapping({"proximal": "bypass", **term})
    adapter = OffPolicyLoss(spec, ActorConfig(), prove=True, base_loss=with_policy_term)
    pi, mu = torch.full((1, 2), -1.0, requires_grad=True), torch.tensor([[math.nan, -1.0]])
    columns = {"responses": torch.ones(1, 2), "response_mask": torch.ones(1, 2), "advantages": torch.zeros(1, 2)}
    columns |= {"old_log_probs": mu, "rollout_log_probs": mu, "ref_log_prob": torch.full((1, 2), -1.5)}
    data = TensorDict(columns, batch_size=1)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=2, global_batch_size=1)
    loss, metrics = adapter({"log_probs": pi * 1.0}, data)
    loss.backward()
    assert pi.grad is not None
    slope = 0.5 if spec.kl_clip is not None else 0.625
    assert pi.grad[0].tolist() == pytest.approx([0.0, 0.1 * slope / 2])
    assert metrics[METRIC_KEY].proof.gradient_error < 1e-6
