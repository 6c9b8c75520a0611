"""Log-ratios of policies and what is measured of them by token. Nothing here reads a padded position."""

from __future__ import annotations

import torch
from torch import Tensor

EXP_CLAMP = 20.0
"""Log-ratios are clamped to +-20 nats where they are exponentiated, and only there."""


def valid_tokens(response_mask: Tensor, *log_probs: Tensor) -> Tensor:
    """Tokens that count: in the response mask, and finite in each of the log-probs.

    Args:
        response_mask: (B, T) bool, integer or float; true on tokens that the policy chose.
        log_probs: (B, T) each, any float dtype; padding may hold anything.

    Returns:
        (B, T) bool.
    """
    valid = response_mask.bool()
    for log_prob in log_probs:
        valid = valid & torch.isfinite(log_prob)
    return valid


def log_ratio(numerator: Tensor, denominator: Tensor, valid: Tensor) -> Tensor:
    """log(numerator policy / denominator policy) a token, in nats.

    Args:
        numerator, denominator: (B, T) log-probs of any float dtype, detached here.
        valid: (B, T) bool.

    Returns:
        (B, T) float64, 0 where not valid, whatever stands there. The difference of two float32 is not a float32 once
        they are a factor of 2 apart, and a sum over thousands of tokens would show it.
    """
    difference = numerator.detach().double() - denominator.detach().double()
    return torch.where(valid, difference, torch.zeros((), dtype=torch.float64, device=difference.device))


def weight_dtype(*log_probs: Tensor) -> torch.dtype:
    """The dtype of weights made from log-probs: theirs, and float32 at least."""
    dtype = torch.float32
    for log_prob in log_probs:
        dtype = torch.promote_types(dtype, log_prob.dtype)
    return dtype


def exp_clamped(log_value: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20 nats, so that it is finite in float32."""
    return torch.exp(log_value.clamp(-EXP_CLAMP, EXP_CLAMP))


def excess(log_value: Tensor) -> Tensor:
    """r - 1 in float64, exact where r is near 1; the log-ratio is clamped to +-20 nats."""
    return torch.expm1(log_value.double().clamp(-EXP_CLAMP, EXP_CLAMP))


def divergence(name: str, log_value: Tensor) -> Tensor:
    """Per-token samples of a divergence between the two policies of a ratio r, under the denominator's samples.

    ``k1`` = -log r, ``k2`` = (log r)^2 / 2, ``k3`` = r - 1 - log r (Schulman 2020, Approximating KL divergence), in
    nats; ``tv`` = |r - 1| / 2, whose mean under the denominator is the total variation.

    Args:
        log_value: log r, any shape.

    Returns:
        float64 of the same shape.
    """
    value = log_value.double()
    match name:
        case "k1":
            return -value
        case "k2":
            return value.square() / 2
        case "k3":
            return excess(value) - value
        case "tv":
            return excess(value).abs() / 2
        case _:
            raise ValueError(f"no divergence {name!r}: one of k1, k2, k3, tv.")
