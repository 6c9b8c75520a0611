"""Which bounds can act at all: beyond these no unit of a run whose policies have to do with one another lies."""

from __future__ import annotations

import math

from ..correction import MaskSpec
from ..correction.ratios import EXP_CLAMP
from .parts import Part

FURTHEST = math.log(1e3)
"""Nats of a token, or of their mean: at a ratio of 1000 nothing is left of one policy in the other."""


def furthest(part: Part) -> float:
    """The greatest radius worth proposing, in what the part compares.

    For a sum over tokens it is where weights are clamped, ``EXP_CLAMP``: a cap beyond it never acts.
    """
    spec = part.spec
    summed = spec.level != "token" and (spec.aggregate == "product" or spec.aggregate.endswith("_sum"))
    nats = EXP_CLAMP if summed else FURTHEST
    if part.on_ratio or not isinstance(spec, MaskSpec):
        return nats
    if part.by_batch:
        return nats**2
    if spec.aggregate == "binary_tv":
        return 1.0  # a difference of probabilities
    measure = spec.aggregate.split("_")[0]
    # What the divergence is at a ratio so far off: log r, (log r)^2 / 2, and r for those that grow with it.
    return {"k1": nats, "k2": nats**2 / 2}.get(measure, math.exp(nats))


def absurd(part: Part, radius: float) -> str:
    """Why a bound at ``radius`` is not worth setting; empty where it is."""
    most = furthest(part)
    if radius < most:
        return ""
    unit = " nats" if part.on_ratio else ""
    return (
        f"not identified: it would take a bound at {radius:.3g}{unit}, and beyond {most:.3g} none can act on policies "
        f"that have to do with one another. Look for the fault first: python -m recipe.offpolicy.attribute"
    )
