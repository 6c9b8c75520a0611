"""A policy so small that every expectation over its sequences is a finite sum.

N = V^T sequences y of T tokens from a vocabulary of V. All in float64.

* pi_old has the logits theta . phi(y_<t), with phi the one-hot of the last token next to that of the position;
* pi has theta moved by ``staleness`` x a fixed direction, as optimizer steps move it;
* mu has pi_old's logits plus ``mismatch`` x fixed standard normal noise, drawn for each prefix and token, as another
  engine's rounding is no function of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot


@dataclass(frozen=True)
class World:
    """Constants of an enumeration: all that is fixed while mismatch and staleness vary.

    Attributes:
        tokens: (N, T) int64, every sequence once.
        features: (N, T, F) float64, phi of each prefix.
        theta: (F, V) float64, the parameters of pi_old.
        direction: (F, V) float64, where staleness moves them.
        noise: (N, T, V) float64, equal for equal prefixes.
        rewards: (N,) float64, 1 where every token of the vocabulary occurs, else 0.
    """

    tokens: Tensor
    features: Tensor
    theta: Tensor
    direction: Tensor
    noise: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Policies:
    """The three policies at one mismatch and one staleness.

    Attributes:
        mu, old, pi: (N, T) float64, log-probs of the tokens.
        scores: (N, T, P) float64, grad log pi(y_t | y_<t).
        rewards: (N,) float64.
        gradient: (P,) float64, grad J of J = sum_y pi(y) R(y).
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
    """Build the world of one seed; vocabulary >= 2, 1 <= length."""
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
        mismatch: standard deviation of mu's logits about pi_old's, in nats.
        staleness: standard deviation of pi's parameters about pi_old's; a logit is the sum of two parameters.
    """
    theta = world.theta + staleness * world.direction
    old_logits = world.features @ world.theta
    of_mu, of_pi = old_logits + mismatch * world.noise, world.features @ theta
    return Policies(
        mu=_token_log_prob(of_mu, world.tokens),
        old=_token_log_prob(old_logits, world.tokens),
        pi=_token_log_prob(of_pi, world.tokens),
        scores=_scores(world, theta),
        rewards=world.rewards,
        gradient=_gradient(world, theta),
        features=world.features,
        all_mu=of_mu.log_softmax(-1),
        all_pi=of_pi.log_softmax(-1),
    )


def _token_log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def _scores(world: World, theta: Tensor) -> Tensor:
    """Compute phi outer (one-hot(y_t) - pi(. | y_<t)), the derivative of a log-softmax."""
    return outer(world.features, one_hot(world.tokens, theta.shape[-1]) - (world.features @ theta).softmax(-1))


def outer(features: Tensor, by_logits: Tensor) -> Tensor:
    """Compute the derivative by the parameters, (N, T, P), from that by the logits, (N, T, V)."""
    return torch.einsum("ntf,ntv->ntfv", features, by_logits).flatten(2)


def _gradient(world: World, theta: Tensor) -> Tensor:
    """Compute the gradient by automatic differentiation of J, and so independently of the scores."""
    theta = theta.clone().requires_grad_()
    value = _token_log_prob(world.features @ theta, world.tokens).sum(-1).exp() @ world.rewards
    return torch.autograd.grad(value, theta)[0].flatten()
