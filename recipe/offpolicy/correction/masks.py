"""Masks: bands on an aggregated ratio of policies, decided a row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from .ratios import row_mean
from .spec import MaskSpec, When


def aggregate(spec: MaskSpec, row_log_ratio: Tensor, tokens: Tensor) -> Tensor:
    """The aggregated log ratio that a mask compares, in nats.

    ``geometric`` is (1/T) sum_t log r_t, the log of the geometric mean ratio, and does not change when a row is
    repeated; ``product`` is sum_t log r_t, and grows with length.

    Args:
        row_log_ratio: (B,) float64, sum of the token log-ratios.
        tokens: (B,) float64, T, the number of valid tokens.

    Returns:
        (B,) float64.
    """
    return row_mean(row_log_ratio, tokens) if spec.aggregate == "geometric" else row_log_ratio


def rejected(spec: MaskSpec, log_value: Tensor) -> Tensor:
    """Rows outside the band: log_value < log lower or > log upper, bounds inclusive.

    With ``delta`` this is OPSM's condition mean log(mu/pi) > delta (DeepSeek-V3.2, eq. 9).

    Args:
        log_value: (B,) float64 from ``aggregate``. It is compared in float32, as the log of the bound is, so that a
            row whose mean or sum equals that log in float32 lies inside.

    Returns:
        (B,) bool.
    """
    lower, upper = spec.log_bounds
    value = log_value.to(torch.float32)
    return (value < lower) | (value > upper)


def applies(when: When, advantage_sign: Tensor) -> Tensor:
    """Rows that a mask looks at, by the sign of the row's mean advantage: (B,) -> (B,) bool."""
    if when == "any":
        return torch.ones_like(advantage_sign, dtype=torch.bool)
    return advantage_sign < 0 if when == "negative" else advantage_sign > 0
