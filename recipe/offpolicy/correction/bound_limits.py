"""Largest bounds of a mask that can act, and that are worth proposing, as distances from agreement."""

from __future__ import annotations

import math

from .mask_spec import MaskSpec
from .ratios import EXP_CLAMP

_TOKEN = math.log(1e5)
"""Nats between two policies on one token beyond which no bound in use lies: outlier masks reach to 1e-4."""
_MEAN = math.log(10.0)
"""Nats a token, as a mean over a unit: nothing of one policy is left in the other long before."""


def compute_arithmetic_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement that arithmetic allows; infinite for a sum over the tokens of a unit.

    Example:
        >>> compute_arithmetic_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        20.0
    """
    return math.inf if _summed(mask) else _at(mask, EXP_CLAMP)


def compute_proposal_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement worth proposing as a bound: beyond it no bound is in use.

    Example:
        >>> limit = compute_proposal_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        >>> round(math.exp(limit), 9)  # a mean ratio of 10
        10.0
    """
    if _summed(mask):
        return _at(mask, EXP_CLAMP)
    averaged = mask.level != "token" and (mask.aggregate == "geometric" or mask.aggregate.endswith("_mean"))
    return _at(mask, _MEAN if averaged or mask.aggregate == "second_moment" else _TOKEN)


def _summed(mask: MaskSpec) -> bool:
    return mask.level != "token" and (mask.aggregate == "product" or mask.aggregate.endswith("_sum"))


def _at(mask: MaskSpec, nats: float) -> float:
    """Compute the aggregate's value at a log-ratio of ``nats``."""
    if mask.aggregate == "binary_tv":
        return math.inf  # a difference of probabilities, whose range the mask itself is held to
    if mask.aggregate == "second_moment":
        return nats**2
    measure = mask.aggregate.split("_")[0]
    return {
        "k2": nats**2 / 2,
        "k3": math.expm1(nats) - nats,
        "tv": math.expm1(nats) / 2,
    }.get(measure, nats)
