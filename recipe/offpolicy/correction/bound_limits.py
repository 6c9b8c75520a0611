"""Largest bounds of a mask that can act, and that are worth proposing, as distances from agreement."""

from __future__ import annotations

import math

from .mask_spec import MaskSpec
from .ratios import EXP_CLAMP

_TOKEN = math.log(1e5)
"""Largest bound in use on one token, in nats: outlier masks reach to ratios of 1e-4."""
_MEAN = math.log(10.0)
"""Largest bound worth proposing on a mean over a unit, in nats a token: such policies have diverged long before."""


def compute_arithmetic_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement that arithmetic allows; infinite for a sum over the tokens of a unit.

    Example:
        >>> compute_arithmetic_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        20.0
    """
    return math.inf if _summed(mask) else mask.entry.at(EXP_CLAMP)


def compute_proposal_limit(mask: MaskSpec) -> float:
    """Compute the largest distance from agreement worth proposing as a bound: beyond it no bound is in use.

    Example:
        >>> limit = compute_proposal_limit(MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any"))
        >>> round(math.exp(limit), 9)  # a mean ratio of 10
        10.0
    """
    if _summed(mask):
        return mask.entry.at(EXP_CLAMP)
    averaged = mask.entry.reduce == "batch" or (mask.level != "token" and mask.entry.reduce == "mean")
    return mask.entry.at(_MEAN if averaged else _TOKEN)


def _summed(mask: MaskSpec) -> bool:
    return mask.level != "token" and mask.entry.reduce == "sum"
