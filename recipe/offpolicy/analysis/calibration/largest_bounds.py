"""Largest bounds worth proposing: units beyond them occur only where the policies are unrelated."""

from __future__ import annotations

import math

from ...correction import MaskSpec, bound_limits
from ...correction.ratios import EXP_CLAMP
from .parts import BoundedPart

_FURTHEST_WEIGHT = math.log(1e3)
"""Nats of a token, or of their mean: at a ratio of 1000 nothing is left of one policy in the other."""


def find_largest_radius(part: BoundedPart) -> float:
    """Return the largest radius worth proposing, in the part's compared values; for a mask the inert limit of
    preflight."""
    spec = part.spec
    if not isinstance(spec, MaskSpec):
        return EXP_CLAMP if spec.level != "token" and spec.aggregate == "product" else _FURTHEST_WEIGHT
    return min(bound_limits.compute_proposal_limit(spec), spec.entry.greatest)


def check_radius(part: BoundedPart, radius: float) -> str:
    """Say why a bound at ``radius`` is not worth setting; empty where it is."""
    most = find_largest_radius(part)
    if radius < most:
        return ""
    unit = " nats" if part.on_ratio else ""
    return (
        f"not identified: it would take a bound at {radius:.3g}{unit}, and beyond {most:.3g} no bound acts "
        f"on related policies. Look for the fault first: python -m recipe.offpolicy.attribute"
    )
