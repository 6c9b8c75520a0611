"""Log-ratios of policies and their sums per row. Nothing here reads a padded position."""

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
        (B, T) in float32 or wider, 0 where not valid, whatever stands there.
    """
    dtype = torch.promote_types(torch.promote_types(numerator.dtype, denominator.dtype), torch.float32)
    difference = numerator.detach().to(dtype) - denominator.detach().to(dtype)
    return torch.where(valid, difference, torch.zeros((), dtype=dtype, device=difference.device))


def exp_clamped(log_value: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-20 nats, so that it is finite in float32."""
    return torch.exp(log_value.clamp(-EXP_CLAMP, EXP_CLAMP))


def row_sum(values: Tensor) -> Tensor:
    """Sum over tokens, accumulated in float64: (B, T) -> (B,) float64."""
    return values.sum(-1, dtype=torch.float64)


def row_mean(row_total: Tensor, tokens: Tensor) -> Tensor:
    """Mean over a row's valid tokens: (B,) float64; 0, the value of two equal policies, where there are none."""
    return row_total / tokens.clamp(min=1)
