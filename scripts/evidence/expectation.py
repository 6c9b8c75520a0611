"""Bias, direction and variance of an estimator's gradient, by exact sums over mu's sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from enumeration import Policies
from estimator_catalogue import Estimator
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage, step_stage


@dataclass(frozen=True)
class Measurement:
    """Exact bias, direction and variance of one estimator.

    Attributes:
        bias: |E_mu[g] - grad J| / |grad J|.
        cosine: between E_mu[g] and grad J; NaN where E_mu[g] = 0.
        variance: trace of the covariance of one row's g, not divided by anything.
        dropped: share of the tokens that mu samples and the correction removes.
        score_mean: |E_mu[sum_t w_t grad log pi_t]|; a baseline b moves E_mu[g] by b times this.
        break_even: rows of a batch whose standard error is the bias, variance / |E_mu[g] - grad J|^2; inf without bias.
    """

    bias: float
    cosine: float
    variance: float
    dropped: float
    score_mean: float
    break_even: float


def token_weights(estimator: Estimator, policies: Policies) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the factor that the shipped correction and the base loss put before A grad log pi.

    A normalised weight is divided by its expectation, the limit of its batch mean: here rows are not samples that
    count alike, but sequences with their probability.

    Returns:
        (N, T) float64 weight x keep x base ratio; (N, T) bool keep; (N,) float64 advantage R - E_mu[R], the limit of
        a large group's.
    """
    spec = CorrectionSpec.from_mapping(estimator.correction)
    normalize = spec.weight is not None and spec.weight.normalize
    if spec.weight is not None and normalize:
        spec = replace(spec, weight=replace(spec.weight, normalize=False))
    advantage = policies.rewards - policies.probability @ policies.rewards
    everything = torch.ones_like(policies.pi, dtype=torch.bool)
    stage = rollout_stage(spec, old_log_prob=policies.old, rollout_log_prob=policies.mu, response_mask=everything)
    step = step_stage(spec, stage, log_prob=policies.pi, advantages=advantage[:, None] * everything)
    weight = step.weight * step.keep
    if normalize:
        weight = weight / (policies.probability @ weight.mean(-1))
    if estimator.base == "ppo":
        weight = weight * (policies.pi - policies.old).exp()
    return weight, step.keep, advantage


def measure(estimator: Estimator, policies: Policies) -> Measurement:
    """Measure one estimator at one setting.

    The variance of a self-normalised estimate is that of its linearisation, w (g - E[w g]) / E[w].
    """
    weight, keep, advantage = token_weights(estimator, policies)
    weighted_score = torch.einsum("nt,ntp->np", weight, policies.scores)
    rows = advantage[:, None] * weighted_score
    dropped = float(policies.probability @ (~keep).double().mean(-1))
    share = weight.mean(-1, keepdim=True) if _normalised(estimator) else None
    return summarise(rows, weighted_score, policies, dropped=dropped, share=share)


def summarise(
    rows: Tensor, weighted_score: Tensor, policies: Policies, *, dropped: float, share: Tensor | None = None
) -> Measurement:
    """Summarise the gradients of all sequences under their probabilities.

    Args:
        rows: (N, P) g of each sequence.
        weighted_score: (N, P) its sum_t w_t grad log pi_t.
        dropped: see ``Measurement``.
        share: (N, 1) part of E[g] that is subtracted from each g for the variance; None: 1.
    """
    mu, gradient = policies.probability, policies.gradient
    mean = mu @ rows
    centre = mean if share is None else share * mean
    error = mean - gradient
    variance = float(mu @ (rows - centre).square().sum(-1))
    return Measurement(
        bias=float(error.norm() / gradient.norm()),
        cosine=float(mean @ gradient / (mean.norm() * gradient.norm())),
        variance=variance,
        dropped=dropped,
        score_mean=float((mu @ weighted_score).norm()),
        break_even=variance / square if (square := float(error.square().sum())) else math.inf,
    )


def _normalised(estimator: Estimator) -> bool:
    return bool((estimator.correction.get("weight") or {}).get("normalize", False))
