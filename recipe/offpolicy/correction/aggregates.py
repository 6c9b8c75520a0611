"""What a mask compares with its bounds, by unit, as least and greatest value."""

from __future__ import annotations

import torch
from torch import Tensor

from . import MaskSpec
from .ratios import divergence
from .units import Units


def extremes(
    mask: MaskSpec, units: Units, log_value: Tensor, *, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor]:
    """Least and greatest of what ``correction.masks.outside`` compares: a unit lies inside if and only if both do.

    Args:
        units: of ``mask.level``.
        log_value: (B, T) float64, log r_t in nats, 0 off ``units.valid``.
        numerator, denominator: (B, T) log-probs of the two policies of the ratio; read by ``binary_tv`` alone.

    Returns:
        (B, U) float64 each, not yet rounded to float32 as a mask compares them, in nats of log ratio for aggregates
        that are ratios. One and the same but for aggregates that bind each token by itself; (log r)^2 for
        ``second_moment``, which the batch's cutoff binds. Without meaning for a unit without a token.
    """
    match mask.aggregate:
        case "product":
            value = units.total(log_value)
        case "geometric":
            value = units.mean(log_value)
        case "any":
            return -units.greatest(-log_value), units.greatest(log_value)
        case "binary_tv":
            gap = numerator.detach().double().exp() - denominator.detach().double().exp()
            return -units.greatest(-gap), units.greatest(gap)
        case "second_moment":
            value = log_value.square()
        case _:
            measure, reduction = mask.aggregate.split("_")
            tokens = torch.where(units.valid, divergence(measure, log_value), 0.0)
            reduce = {"max": units.greatest, "mean": units.mean, "sum": units.total}[reduction]
            value = reduce(tokens)
    return value, value
