"""Log-ratios of two policies and per-token functions of them; padded positions are never read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXP_CLAMP = 20.0
"""Log-ratios are clamped to +-20 nats only when they are exponentiated."""


def find_valid_tokens(response_mask: Tensor, *log_probs: Tensor) -> Tensor:
    """Find the tokens that are in the response mask and finite in each of the log-probs.

    Args:
        response_mask: (B, T) bool, integer or float; true on tokens that the policy chose.
        log_probs: (B, T) each, any float dtype; padding may contain any value.

    Returns:
        (B, T) bool.

    Example:
        >>> find_valid_tokens(torch.tensor([[1, 1, 0]]), torch.tensor([[-1.0, float("-inf"), -1.0]])).tolist()
        [[True, False, False]]
    """
    valid = response_mask.bool()
    for log_prob in log_probs:
        valid = valid & torch.isfinite(log_prob)
    return valid


def compute_log_ratio(numerator: Tensor, denominator: Tensor, valid: Tensor) -> Tensor:
    """Compute log(numerator policy / denominator policy) per token, in nats.

    Args:
        numerator, denominator: (B, T) log-probs of any float dtype, detached here.
        valid: (B, T) bool.

    Returns:
        (B, T) float64, 0 for tokens that are not valid, regardless of their values. If two float32 numbers differ by
        more than a factor of 2, float32 cannot always represent their difference, and the error would be visible in a
        sum over thousands of tokens.

    Example:
        >>> pi_old, mu = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, 7.0]])
        >>> compute_log_ratio(pi_old, mu, torch.tensor([[True, False]])).tolist()
        [[0.5, 0.0]]
    """
    return torch.where(valid, numerator.detach().double() - denominator.detach(), 0.0)


def compute_finite_log_ratio(numerator: Tensor, denominator: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``find_valid_tokens`` and ``compute_log_ratio`` in one pass over the log-probs.

    Args:
        numerator, denominator: log-probs of any float dtype and of the same shape, detached here.
        response_mask: bool, of that shape.

    Returns:
        The tokens whose two log-probs are both finite, and the log-ratio: float64, 0 for all other tokens.

    Example:
        >>> pi_old, mu = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, float("nan")]])
        >>> valid, log_rho = compute_finite_log_ratio(pi_old, mu, torch.tensor([[True, True]]))
        >>> valid.tolist(), log_rho.tolist()
        ([[True, False]], [[0.5, 0.0]])
    """
    difference = numerator.detach().double() - denominator.detach()
    # A difference is finite if both of its terms are, and a finite number minus itself is 0.
    valid = response_mask & (difference - difference == 0)
    return valid, torch.where(valid, difference, 0.0)


def promote_weight_dtype(*log_probs: Tensor) -> torch.dtype:
    """Return the dtype of weights computed from log-probs: the dtype of the log-probs, but at least float32.

    Example:
        >>> promote_weight_dtype(torch.zeros(1, dtype=torch.bfloat16))
        torch.float32
    """
    dtype = torch.float32
    for log_prob in log_probs:
        dtype = torch.promote_types(dtype, log_prob.dtype)
    return dtype


def clamp_and_exp(log_value: Tensor) -> Tensor:
    """Clamp a log-ratio to +-20 nats and exponentiate it, so the ratio is finite in float32.

    Example:
        >>> clamp_and_exp(torch.tensor([0.0, float("inf")])).log().tolist()
        [0.0, 20.0]
    """
    return log_value.clamp(-EXP_CLAMP, EXP_CLAMP).exp_()


def compute_excess(log_value: Tensor) -> Tensor:
    """Compute r - 1 from log r, clamped to +-20 nats: float64, exact if r is near 1.

    Example:
        >>> compute_excess(torch.tensor([0.0, 1e-12], dtype=torch.float64)).tolist() == [0.0, 1e-12 + 5e-25]
        True
    """
    return log_value.double().clamp(-EXP_CLAMP, EXP_CLAMP).expm1_()


def exceeds_bounds(value: Tensor, lower: Tensor | float, upper: Tensor | float) -> Tensor:
    """Flag values outside the inclusive range [lower, upper]. As for all bounds, the comparison is in float32.

    A bound is either one number for all values, or a float32 tensor with one number per value.

    Example:
        >>> exceeds_bounds(torch.tensor([0.4, 0.5, 2.0, 2.1]), 0.5, 2.0).tolist()
        [True, False, False, True]
    """
    value = value.to(torch.float32)
    if not isinstance(lower, Tensor) and lower == -math.inf:
        return value > upper
    open_above = not isinstance(upper, Tensor) and upper == math.inf
    return value < lower if open_above else (value < lower) | (value > upper)


def compute_divergence(name: str, log_value: Tensor) -> Tensor:
    """Compute per-token estimates of a divergence between a ratio's policies, from samples of the denominator's policy.

    ``k1`` = -log r, ``k2`` = (log r)^2 / 2, ``k3`` = r - 1 - log r (Schulman 2020, Approximating KL divergence), in
    nats; ``tv`` = |r - 1| / 2, whose mean under the denominator is the total variation.

    Args:
        log_value: log r, any shape.

    Returns:
        float64 of the same shape.

    Example:
        >>> [round(compute_divergence(name, torch.tensor(2.0).log()).item(), 4) for name in ("k1", "k2", "k3", "tv")]
        [-0.6931, 0.2402, 0.3069, 0.5]
    """
    value = log_value.double()
    match name:
        case "k1":
            return -value
        case "k2":
            return value.square() / 2
        case "k3":
            return compute_excess(value) - value
        case "tv":
            return compute_excess(value).abs() / 2
        case _:
            raise ValueError(f"unknown divergence {name!r}: expected one of k1, k2, k3, tv.")
