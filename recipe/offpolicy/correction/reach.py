"""How far from agreement a mask's bound may lie and still act."""

from __future__ import annotations

import math

from .mask_spec import MaskSpec
from .ratios import EXP_CLAMP

_TOKEN = math.log(1e5)
"""Nats between two policies on one token beyond which no bound in use lies: outlier masks reach to 1e-4."""
_MEAN = math.log(10.0)
"""Nats a token, as a mean over a unit: nothing of one policy is left in the other long before."""


def clamped(mask: MaskSpec) -> float:
    """The greatest distance from agreement that arithmetic allows; infinite for a sum over the tokens of a unit."""
    return math.inf if _summed(mask) else mask.entry.at(EXP_CLAMP)


def furthest(mask: MaskSpec) -> float:
    """The greatest distance from agreement, in what the mask compares, that is in use or was seen."""
    if _summed(mask):
        return mask.entry.at(EXP_CLAMP)
    averaged = mask.entry.reduce == "batch" or (mask.level != "token" and mask.entry.reduce == "mean")
    return mask.entry.at(_MEAN if averaged else _TOKEN)


def _summed(mask: MaskSpec) -> bool:
    return mask.level != "token" and mask.entry.reduce == "sum"
