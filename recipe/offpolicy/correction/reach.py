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
    return math.inf if _summed(mask) else _at(mask, EXP_CLAMP)


def furthest(mask: MaskSpec) -> float:
    """The greatest distance from agreement, in what the mask compares, that is in use or was seen."""
    if _summed(mask):
        return _at(mask, EXP_CLAMP)
    averaged = mask.level != "token" and (mask.aggregate == "geometric" or mask.aggregate.endswith("_mean"))
    return _at(mask, _MEAN if averaged or mask.aggregate == "second_moment" else _TOKEN)


def _summed(mask: MaskSpec) -> bool:
    return mask.level != "token" and (mask.aggregate == "product" or mask.aggregate.endswith("_sum"))


def _at(mask: MaskSpec, nats: float) -> float:
    """What a mask compares where the log-ratio is ``nats``."""
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
