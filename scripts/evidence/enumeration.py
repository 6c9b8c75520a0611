"""Exact evaluation of corrections, with a policy so small that expectations over its sequences are finite sums.

There are N = V^T sequences y of T tokens from a vocabulary of size V.

* pi_old has the logits theta . phi(y_<t), where phi consists of the one-hot of the last token and the one-hot of the
  position;
* pi has theta moved by ``staleness`` times a fixed direction, as optimizer steps would move it;
* mu has the logits of pi_old plus ``mismatch`` times fixed standard normal noise, drawn for each prefix and token,
  because another engine's rounding is not a function of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor
from torch.nn.functional import one_hot

from recipe.offpolicy import correction
from recipe.offpolicy.correction import CorrectionSpec, RolloutStage, StepStage, rollout_stage
from recipe.offpolicy.correction.centering import compute_coefficients, select_token_parts

OPTIONS = Path(__file__).resolve().parents[2] / "configs" / "correction"
DELTA, AGE = 0.1, 2
"""Delta for options that do not set one, and the age of all tokens, for parts that depend on age."""
CHOICES = ("auto",)
"""Option files that choose among the other options at the start of a run."""
Family = Literal["none", "token weight", "sequence weight", "mask", "both", "option"]


@dataclass(frozen=True)
class World:
    """Constants of an enumeration; they stay fixed while mismatch and staleness vary.

    Attributes:
        tokens: (N, T) int64, each sequence once.
        features: (N, T, F) float64, phi of each prefix.
        theta: (F, V) float64, the parameters of pi_old.
        direction: (F, V) float64, direction in which staleness moves theta.
        noise: (N, T, V) float64, equal for equal prefixes.
        rewards: (N,) float64, 1 if every token of the vocabulary occurs, otherwise 0.
    """

    tokens: Tensor
    features: Tensor
    theta: Tensor
    direction: Tensor
    noise: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Policies:
    """The three policies for one mismatch and one staleness.

    Attributes:
        mu, old, pi: (N, T) float64, log-probs of the tokens.
        scores: (N, T, P) float64, grad log pi(y_t | y_<t).
        rewards: (N,) float64.
        gradient: (P,) float64, gradient of J = sum_y pi(y) R(y).
        features: (N, T, F) float64, phi of each prefix.
        all_mu, all_pi: (N, T, V) float64, log-probs of the whole vocabulary at each prefix.
    """

    mu: Tensor
    old: Tensor
    pi: Tensor
    scores: Tensor
    rewards: Tensor
    gradient: Tensor
    features: Tensor
    all_mu: Tensor
    all_pi: Tensor

    @property
    def probability(self) -> Tensor:
        """(N,) float64, mu(y)."""
        return self.mu.sum(-1).exp()


def build(vocabulary: int, length: int, seed: int) -> World:
    """Build the world for one seed; requires vocabulary >= 2 and length >= 1."""
    generator = torch.Generator().manual_seed(seed)
    count = vocabulary**length
    number = torch.arange(count)
    tokens = torch.stack([number // vocabulary ** (length - 1 - t) % vocabulary for t in range(length)], dim=-1)
    start = torch.full((count, 1), vocabulary)
    last = torch.cat([start, tokens[:, :-1]], dim=-1)
    position = torch.arange(length).expand(count, length)
    features = torch.cat([one_hot(last, vocabulary + 1), one_hot(position, length)], dim=-1).double()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    theta = 0.7 * normal(features.shape[-1], vocabulary)
    noise = [normal(vocabulary**t, vocabulary)[number // vocabulary ** (length - t)] for t in range(length)]
    return World(
        tokens=tokens,
        features=features,
        theta=theta,
        direction=normal(*theta.shape),
        noise=torch.stack(noise, dim=1),
        rewards=one_hot(tokens, vocabulary).sum(1).gt(0).all(-1).double(),
    )


def policies(world: World, *, mismatch: float, staleness: float) -> Policies:
    """Build the three policies.

    Args:
        mismatch: standard deviation of mu's logits around pi_old's, in nats.
        staleness: standard deviation of pi's parameters around pi_old's; a logit is the sum of two parameters.
    """
    theta = world.theta + staleness * world.direction
    old_logits = world.features @ world.theta
    of_mu, of_pi = old_logits + mismatch * world.noise, world.features @ theta
    mu, old, pi = (_token_log_prob(logits, world.tokens) for logits in (of_mu, old_logits, of_pi))
    # The derivative of a log-softmax.
    scores = outer(world.features, one_hot(world.tokens, of_pi.shape[-1]) - of_pi.softmax(-1))
    return Policies(
        mu=mu,
        old=old,
        pi=pi,
        scores=scores,
        rewards=world.rewards,
        gradient=_gradient(world, theta),
        features=world.features,
        all_mu=of_mu.log_softmax(-1),
        all_pi=of_pi.log_softmax(-1),
    )


def _token_log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def outer(features: Tensor, by_logits: Tensor) -> Tensor:
    """Convert a derivative with respect to the logits, (N, T, V), to one with respect to the parameters, (N, T, P)."""
    return torch.einsum("ntf,ntv->ntfv", features, by_logits).flatten(2)


def _gradient(world: World, theta: Tensor) -> Tensor:
    """Compute the gradient by automatic differentiation of J, independently of the scores."""
    theta = theta.clone().requires_grad_()
    value = _token_log_prob(world.features @ theta, world.tokens).sum(-1).exp() @ world.rewards
    return torch.autograd.grad(value, theta)[0].flatten()


@dataclass(frozen=True)
class Estimator:
    """A correction, with its name in the tables, where numbers are its bounds; a shipped option has its Hydra name.

    The base loss is PPO's without the clip, (pi / pi_old) A grad log pi; under weights on pi / mu, it is REINFORCE's, A
    grad log pi.
    """

    name: str
    family: Family
    spec: CorrectionSpec


@dataclass(frozen=True)
class Measurement:
    """Exact bias, direction and variance of one estimator.

    Attributes:
        bias: |E_mu[g] - grad J| / |grad J|.
        cosine: cosine between E_mu[g] and grad J; NaN if E_mu[g] = 0.
        variance: trace of the covariance of g for one row, not normalised.
        dropped: share of the tokens sampled by mu that the correction removes.
        score_mean: |E_mu[sum_t w_t grad log pi_t]|; a baseline b shifts E_mu[g] by b times this value.
        break_even: number of rows in a batch for which the standard error equals the bias, variance / |E_mu[g] - grad
            J|^2; inf without bias.
    """

    bias: float
    cosine: float
    variance: float
    dropped: float
    score_mean: float
    break_even: float


def list_options() -> Iterator[Estimator]:
    """List all options, with the values in their files."""
    for path in sorted(OPTIONS.rglob("*.yaml")):
        name = path.relative_to(OPTIONS).with_suffix("").as_posix()
        if name in CHOICES:
            continue
        values: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
        for mask in (values.get("masks") or {}).values():
            mask.update({"delta": DELTA} if mask.get("delta") == "???" else {})
        yield Estimator(name, "option", CorrectionSpec.from_mapping(values))


def measure(estimator: Estimator, policies: Policies, *, turns: int = 1) -> Measurement:
    """Measure one correction at one setting: E_mu of its gradient over all sequences, as the limit of a large batch.

    A normalised weight is divided by its expectation, and the variance of its estimate is that of its linearisation, w
    (g - E[w g]) / E[w]. KL terms are omitted, because they do not change the policy term.

    Args:
        turns: number of turns in each sequence, all of equal length.
    """
    spec, mu = estimator.spec, policies.probability
    old = correction.proximal_log_prob(
        spec.proximal,
        spec.alpha,
        old_log_prob=policies.old,
        rollout_log_prob=policies.mu,
        log_prob=policies.pi,
        ages=_fill(policies, AGE),
    )
    advantage = policies.rewards - mu @ policies.rewards
    stage, step = decide(spec, policies, old, advantage, turns)
    if spec.baseline == "exclude":
        kept = mu * stage.keep.any(-1)
        advantage = policies.rewards - kept @ policies.rewards / kept.sum()
        stage, step = decide(spec, policies, old, advantage, turns)
    factor = step.weight * step.keep
    if not spec.weighs_full_ratio:
        factor = factor * (policies.pi - old).exp()
    if spec.denominator == "kept":
        factor = factor / (mu @ stage.keep.double().mean(-1))
    score = torch.einsum("nt,ntp->np", factor, policies.scores)
    if spec.centering is not None:
        score = score - _expected_score(spec, policies, step)
    rows = advantage[:, None] * score
    if spec.penalty is not None:
        other = policies.mu if spec.penalty.ratio == "full" else old
        pull = 2 * spec.penalty.coefficient * (policies.pi - other)
        rows = rows - torch.einsum("nt,ntp->np", pull, policies.scores)
    mean = mu @ rows
    centre = mean if spec.normalized is None else factor.mean(-1, keepdim=True) * mean
    error = mean - policies.gradient
    variance = float(mu @ (rows - centre).square().sum(-1))
    return Measurement(
        bias=float(error.norm() / policies.gradient.norm()),
        cosine=float(mean @ policies.gradient / (mean.norm() * policies.gradient.norm())),
        variance=variance,
        dropped=float(mu @ (~step.keep).double().mean(-1)),
        score_mean=float((mu @ score).norm()),
        break_even=variance / square if (square := float(error.square().sum())) else math.inf,
    )


def decide(
    spec: CorrectionSpec, policies: Policies, old: Tensor, advantage: Tensor, turns: int = 1
) -> tuple[RolloutStage, StepStage]:
    """Run both stages, where batch-wide constants have the values that they would have for a large batch."""
    columns: dict[str, Any] = dict(
        old_log_prob=old,
        rollout_log_prob=policies.mu,
        response_mask=torch.ones_like(old, dtype=torch.bool),
        segment_ids=(torch.arange(old.shape[1]) * turns // old.shape[1]).expand_as(old),
        versions=_fill(policies, 0),
        staleness=_fill(policies, AGE)[:, 0],
    )
    mean = 1.0
    if (normalized := spec.normalized) is not None:
        plain = CorrectionSpec(weight=replace(normalized, normalize=False))
        raw = rollout_stage(plain, **columns)
        mean = float(policies.probability @ (raw.weight * raw.keep).mean(-1))
    budgets = {name: mask.budget for name, mask in spec.masks if mask.budget is not None}
    cutoffs = {name: _find_cutoff(budget, policies, old - policies.mu) for name, budget in budgets.items()}
    stage = rollout_stage(spec, **columns, constants=correction.BatchConstants(weight_mean=mean, cutoffs=cutoffs))
    return stage, correction.step_stage(spec, stage, log_prob=policies.pi, advantages=advantage[:, None].expand_as(old))


def _find_cutoff(budget: float, policies: Policies, log_ratio: Tensor) -> float:
    """Find the largest (log r)^2 such that the mean of all (log r)^2 up to it is within the budget."""
    squares, order = log_ratio.square().flatten().sort()
    mass = (policies.probability[:, None].expand_as(log_ratio).flatten() / log_ratio.shape[1])[order]
    kept = (mass * squares).cumsum(0) / mass.cumsum(0) <= budget
    return float(squares[kept][-1]) if bool(kept.any()) else 0.0


def _expected_score(spec: CorrectionSpec, policies: Policies, step: StepStage) -> Tensor:
    """Compute the sum over t of the term that score centering subtracts, over the whole vocabulary: (N, P)."""
    shape = policies.all_pi.shape
    flat = (each.reshape(-1, shape[-1]) for each in (policies.all_pi, policies.all_mu))
    coefficients = compute_coefficients(spec, *flat).view(shape)
    by_logits = coefficients - coefficients.sum(-1, keepdim=True) * policies.all_pi.exp()
    centred = {f"masks.{name}" for name, _ in select_token_parts(spec).masks} | set(spec.all_weights)
    kept = torch.ones_like(step.keep)
    for part, drop in step.rejected.items():
        kept = kept if part in centred else kept & ~drop
    return (kept[..., None] * outer(policies.features, by_logits)).sum(1)


def _fill(policies: Policies, value: int) -> Tensor:
    return torch.full(policies.pi.shape, value, dtype=torch.int64)
