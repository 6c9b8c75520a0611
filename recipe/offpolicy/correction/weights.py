"""Importance weights on pi_old / mu."""

from __future__ import annotations

import torch
from torch import Tensor

from .ratios import exp_clamped
from .spec import WeightSpec


def raw_weight(spec: WeightSpec | None, log_ratio: Tensor, row_log_ratio: Tensor, valid: Tensor) -> Tensor:
    """Importance weights before their bounds.

    Token level weighs each token by its own rho_t = pi_old / mu, sequence level every token of a row by prod_t rho_t.

    Args:
        spec: level; None gives weight 1.
        log_ratio: (B, T) float32 or wider, log rho_t, 0 where not valid.
        row_log_ratio: (B,) float64, the sum of log_ratio over the row.
        valid: (B, T) bool.

    Returns:
        (B, T) in log_ratio's dtype, detached, 0 where not valid.
    """
    if spec is None:
        return valid.to(log_ratio.dtype)
    if spec.level == "token":
        raw = exp_clamped(log_ratio)
    else:
        raw = exp_clamped(row_log_ratio).to(log_ratio.dtype)[:, None].expand_as(log_ratio)
    return torch.where(valid, raw, torch.zeros((), dtype=raw.dtype, device=raw.device))


def bounded(spec: WeightSpec | None, raw: Tensor, valid: Tensor) -> Tensor:
    """Truncated importance weights, clip(raw, lower, upper).

    Yao et al. 2025 truncate by token with upper = 2.0, Liu et al. 2025 by sequence with upper = 5.0.

    Args:
        raw: (B, T) from ``raw_weight``.
        valid: (B, T) bool.

    Returns:
        (B, T) in raw's dtype, 0 where not valid.
    """
    if spec is None or (spec.lower is None and spec.upper is None):
        return raw
    return torch.where(valid, raw.clamp(min=spec.lower, max=spec.upper), raw)
