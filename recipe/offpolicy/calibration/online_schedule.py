"""The next bounds of one mask, from how far its units lay from agreement; pure.

A bound is its distance from agreement: |log bound| in nats for ratios, |bound| for the other aggregates. It moves
towards the quantile that keeps the wanted share, by a bounded factor a time, within a range around what was configured,
and never below the backend noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..correction import MaskSpec
from ..correction.mask_spec import ON_RATIO
from .online_histogram import Side, moving_sides, quantile

_WIDEST: Final = {"binary_tv": 0.99, "geometric": 20.0, "any": 20.0, "product": 600.0}
"""Greatest distance that a bound can have and still act, or be written as a ratio."""


@dataclass(frozen=True)
class Schedule:
    """How bounds move; see ``online_settings`` for the keys.

    Attributes:
        target_kept: share of the units that a mask looks at.
        rate: a distance changes by a factor of at most 1 + rate a time.
        floor, ceiling: range of a distance, in multiples of the configured one.
        noise_kept: share of units of equal weights that backend noise alone must not drop.
    """

    target_kept: float
    side: Side
    rate: float
    floor: float
    ceiling: float
    noise_kept: float


@dataclass(frozen=True)
class Evidence:
    """Counts by bin over the updates looked at, see ``online_histogram``; noise is None where it does not matter."""

    distances: Sequence[float]
    noise: Sequence[float] | None = None


def next_bounds(
    schedule: Schedule, configured: MaskSpec, current: MaskSpec, evidence: Evidence
) -> dict[str, float | None]:
    """The keys that bound a mask, with their next values; the current ones where there is too little to go by."""
    distances = distances_of(current)
    if not _has_a_tail(evidence.distances, schedule.target_kept):
        return written(current, distances)
    goal = quantile(evidence.distances, schedule.target_kept)
    noise = 0.0
    if evidence.noise is not None:
        # Without rows of equal weights nobody knows the noise, and a bound that narrows might get below it.
        enough = _has_a_tail(evidence.noise, schedule.noise_kept)
        noise = quantile(evidence.noise, schedule.noise_kept) if enough else math.nan
    start, widest = distances_of(configured), _WIDEST.get(current.aggregate, math.inf)
    for name in moving_sides(configured, schedule.side):
        here = distances[name]
        wanted = min(max(goal, here / (1.0 + schedule.rate)), here * (1.0 + schedule.rate))
        wanted = min(max(wanted, schedule.floor * start[name]), schedule.ceiling * start[name])
        least = here if math.isnan(noise) else noise
        distances[name] = min(max(wanted, least), widest)
    return written(current, distances)


def _has_a_tail(counts: Sequence[float], kept: float) -> bool:
    """Whether so many were counted that one of them can lie beyond the share that is kept."""
    return sum(counts) * (1.0 - kept) >= 1.0 - 1e-9


def distances_of(mask: MaskSpec) -> dict[str, float]:
    """Side -> distance of its bound from agreement; infinite where it is open."""
    lower, upper = mask.limits
    return {"lower": -lower, "upper": upper}


def written(mask: MaskSpec, distances: Mapping[str, float]) -> dict[str, float | None]:
    """The distances as the keys that bound the mask; a bound that has not moved stays to the bit."""
    before = distances_of(mask)
    if mask.delta is not None:
        return {"delta": mask.delta if distances["lower"] == before["lower"] else distances["lower"]}
    values: dict[str, float | None] = {}
    for name, sign in (("lower", -1.0), ("upper", 1.0)):
        distance = distances[name]
        if distance == before[name] or math.isinf(distance):
            values[name] = getattr(mask, name)
        else:
            values[name] = math.exp(sign * distance) if mask.aggregate in ON_RATIO else sign * distance
    return values
