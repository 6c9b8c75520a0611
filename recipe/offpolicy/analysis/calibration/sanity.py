"""Which bounds can act at all: beyond these no unit of a run whose policies have to do with one another lies."""

from __future__ import annotations

import math

from ...correction import MaskSpec, bound_limits
from ...correction.ratios import EXP_CLAMP
from .parts import Part

_FURTHEST_WEIGHT = math.log(1e3)
"""Nats of a token, or of their mean: at a ratio of 1000 nothing is left of one policy in the other."""


def furthest(part: Part) -> float:
    """The greatest radius worth proposing, in what the part compares: of a mask what the launch does not call inert."""
    spec = part.spec
    if not isinstance(spec, MaskSpec):
        return EXP_CLAMP if spec.level != "token" and spec.aggregate == "product" else _FURTHEST_WEIGHT
    return (
        1.0 if spec.aggregate == "binary_tv" else bound_limits.compute_proposal_limit(spec)
    )  # a difference of probabilities


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
