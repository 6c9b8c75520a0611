"""Log-ratios of policies and what is measured of them by token. Nothing here reads a padded position."""

from __future__ import annotations

import math

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
    return torch.where(valid, numerator.detach().double() - denominator.detach(), 0.0)


def finite_log_ratio(numerator: Tensor, denominator: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``valid_tokens`` and ``log_ratio`` at once, by one look at each log-prob.

    Args:
        numerator, denominator: log-probs of any float dtype and one shape, detached here.
        response_mask: bool, of that shape.

    Returns:
        The tokens whose two log-probs are finite, and their log-ratio, float64, 0 elsewhere.
    """
    difference = numerator.detach().double() - denominator.detach()
    # A difference is finite where both of its terms are, and a number less itself is 0 where it is finite.
    valid = response_mask & (difference - difference == 0)
    return valid, torch.where(valid, difference, 0.0)


def weight_dtype(*log_probs: Tensor) -> torch.dtype:
    """The dtype of weights made from log-probs: theirs, and float32 at least."""
    dtype = torch.float32
    for log_prob in log_probs:
        dtype = torch.promote_types(dtype, log_prob.dtype)
    return dtype


def exp_clamped(log_value: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20 nats, so that it is finite in float32."""
    return log_value.clamp(-EXP_CLAMP, EXP_CLAMP).exp_()


def excess(log_value: Tensor) -> Tensor:
    """r - 1 in float64, exact where r is near 1; the log-ratio is clamped to +-20 nats."""
    return log_value.double().clamp(-EXP_CLAMP, EXP_CLAMP).expm1_()


def beyond(value: Tensor, lower: float, upper: float) -> Tensor:
    """Whether a value lies outside [lower, upper], inclusive, as every bound is compared: in float32."""
    value = value.to(torch.float32)
    if lower == -math.inf:
        return value > upper
    return value < lower if upper == math.inf else (value < lower) | (value > upper)


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
