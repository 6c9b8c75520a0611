"""Inverses of aggregates: the log-ratio, or the two probabilities, at which an aggregate has a given value.

These functions do not use ``correction.masks``, because the proof must not call the code that it checks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HIGH = 0.95
"""The higher probability whenever two policies must differ at a token."""
MOST_UPWARD = 2.5
"""Largest KL(low, ``HIGH``), in nats, for any low probability; KL(``HIGH``, low) can be as large as 12.9."""


def invert_aggregate(aggregate: str, value: Tensor, side: float, free: Tensor) -> Tensor:
    """Compute one token's log-ratio for which the aggregate's sum is ``value``; the sign is ``free`` if possible."""
    match aggregate.split("_")[0]:
        case "k1":
            return -value
        case "k2" | "second":
            root = value if aggregate == "second_moment" else 2 * value
            return free * root.clamp(min=0).sqrt()
        case "tv":
            up = torch.log1p(2 * value)
            # A ratio can fall by less than 1, so |r - 1| / 2 stays below 0.5; larger values need a ratio above 1.
            return torch.where((free < 0) & (value < 0.49), torch.log1p(-2 * value.clamp(max=0.49)), up)
        case "k3":
            return torch.where(free > 0, _invert_k3(value, 1.0), _invert_k3(value, -1.0))
        case "product" | "geometric" | "any":
            return value
        case "exp":
            return free * torch.log1p(value)
        case _:
            raise NotImplementedError(
                f"aggregate {aggregate}: the liveness proof does not define this aggregate. Fix: add it to "
                "proof/inverses.py."
            )


def _invert_k3(value: Tensor, sign: float) -> Tensor:
    """Solve exp(l) - 1 - l = value for l of the given sign, by bisection."""
    low, high = torch.zeros_like(value), value + 2.0
    # 80 bisections reduce any interval to the spacing of float64.
    for _ in range(80):
        middle = (low + high) / 2
        too_small = torch.expm1(sign * middle) - sign * middle < value
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return sign * high


def place_gap(at: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Choose two probabilities per token that differ by ``gap`` where ``at`` is true and are equal elsewhere.

    Args:
        at: (B, T) bool.
        gap: float64 that broadcasts against ``at``; all values have the same sign and lie in (-1, 1).

    Returns:
        (B, T) float64 of the numerator and of the denominator.
    """
    size = gap.abs().expand(at.shape)
    high = torch.where(at & (size > 0.9), (1 + size) / 2, HIGH)
    low = torch.where(at, high - size, HIGH)
    return (high, low) if bool((gap > 0).any()) else (low, high)


def invert_binary_kl(aggregate: str, value: float, up: bool) -> float:
    """Find the probability below ``HIGH`` whose binary KL divergence from ``HIGH`` (or the reverse) is ``value``.

    Args:
        up: True if the numerator is ``HIGH`` and the denominator is the probability to find; False for the reverse.
    """

    def divergence(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    low, high = 1e-6, HIGH
    for _ in range(80):
        middle = (low + high) / 2
        forward = divergence(middle, HIGH) if up else divergence(HIGH, middle)
        either = max(divergence(HIGH, middle), divergence(middle, HIGH)) if aggregate == "binary_kl" else forward
        low, high = (middle, high) if either > value else (low, middle)
    return low


def place_kl(aggregate: str, at: Tensor, value: Tensor, way: Tensor) -> tuple[Tensor, Tensor]:
    """Choose both policies' probabilities of each token, equal except where ``at`` is true.

    Args:
        at: (B, T) bool.
        value: float64 that broadcasts against ``at``, the binary KL divergence at these tokens.
        way: (B, T), positive where the numerator should be the larger probability; reversed where ``value`` requires
            it.

    Returns:
        (B, T) float64 of the numerator and of the denominator.
    """
    rest = torch.full_like(way, HIGH)
    way, value = torch.where(value > MOST_UPWARD, -1.0, way), value.expand(at.shape)
    low = rest.clone()
    for each in value[at].unique().tolist():
        for up in (True, False):
            low[at & (value == each) & ((way > 0) == up)] = invert_binary_kl(aggregate, each, up)
    return torch.where(way > 0, rest, low), torch.where(way > 0, low, rest)
