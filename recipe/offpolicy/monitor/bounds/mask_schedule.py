"""The next bounds of one mask, from how far its units lay from agreement; pure.

A bound is its distance from agreement: |log bound| in nats for ratios, |bound| for the other aggregates. It moves
towards the quantile that keeps the wanted share, or to the backend noise if that lies further out, by a bounded factor
a time and within a range around what was configured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...correction import MaskSpec
from ...correction.moving_bounds import Side
from .histogram import moving_sides, quantile


@dataclass(frozen=True)
class Schedule:
    """How bounds move; see ``online_settings`` for the keys.

    Attributes:
        target_kept: share of what a mask looks at, see ``online_histogram``.
        rate: a distance changes by a factor of at most 1 + rate a time.
        floor, ceiling: range of a distance, in multiples of the configured one.
        noise_kept: share of units of equal weights that backend noise alone is not to drop, once the rate got there.
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
    distances, start = distances_of(current), distances_of(configured)
    goal, noise = _goal(schedule, evidence), _noise(schedule, evidence)
    for name in moving_sides(configured, schedule.side):
        here = distances[name]
        # Without rows of equal weights nobody knows the noise, and a bound that narrows might get below it.
        least = here if noise is None else noise
        wanted = max(here if goal is None else goal, least)
        distances[name] = _towards(wanted, schedule, current, here, start[name])
    return written(current, distances)


def obstacles(schedule: Schedule, configured: MaskSpec, current: MaskSpec, evidence: Evidence) -> dict[str, str]:
    """What keeps bounds from where the target would take them: kind of obstacle -> what is the matter, and what helps.

    ``share``: no bound that moves keeps so much. ``noise``: backend noise reaches further. ``ceiling``: so far that
    the bound must not follow.
    """
    found = {}
    goal, noise = _goal(schedule, evidence), _noise(schedule, evidence)
    if goal is None and _has_a_tail(evidence.distances, schedule.target_kept):
        found["share"] = (
            f"{evidence.distances[-1]:.0f} of {sum(evidence.distances):.0f} that it looks at lie beyond a bound that "
            f"does not move, or beyond any, so that no bound keeps {schedule.target_kept:g} of them: it stays. Widen "
            f"the one that does not move, or set offpolicy.calibrate.side=both, or a lower target_kept."
        )
    start, distances = distances_of(configured), distances_of(current)
    for name in moving_sides(configured, schedule.side):
        here, most = distances[name], _most(schedule, current, start[name])
        alone = here if goal is None else _towards(goal, schedule, current, here, start[name])
        if noise is None or noise <= min(here, alone) * (1 + 1e-9):
            continue
        reach = f"backend noise alone reaches {noise:.4g} where {schedule.noise_kept:g} of equal weights are to be kept"
        if noise > most * (1 + 1e-9):
            found["ceiling"] = (
                f"{reach}, and the {name} bound gets no further than {most:.4g}: it rejects for noise. Set a wider "
                f"bound, or a higher offpolicy.calibrate.ceiling, or bring the engines nearer to each other."
            )
        else:
            found["noise"] = (
                f"{reach}, and the {name} bound lies at {here:.4g}: it goes there by a factor of at most "
                f"{1 + schedule.rate:g} a time, and no nearer, whatever offpolicy.calibrate.target_kept asks for."
            )
    return found


def _goal(schedule: Schedule, evidence: Evidence) -> float | None:
    """The distance that keeps the wanted share; None where too little was counted, or no distance keeps it."""
    if not _has_a_tail(evidence.distances, schedule.target_kept):
        return None
    goal = quantile(evidence.distances, schedule.target_kept)
    return goal if math.isfinite(goal) else None


def _noise(schedule: Schedule, evidence: Evidence) -> float | None:
    """The distance that backend noise reaches: 0 where it does not matter, None where it is not known."""
    if evidence.noise is None:
        return 0.0
    return quantile(evidence.noise, schedule.noise_kept) if _has_a_tail(evidence.noise, schedule.noise_kept) else None


def _towards(wanted: float, schedule: Schedule, mask: MaskSpec, here: float, start: float) -> float:
    """The distance nearest to ``wanted`` that the rate and the range allow."""
    return paced(wanted, here, rate=schedule.rate, least=schedule.floor * start, most=_most(schedule, mask, start))


def paced(wanted: float, here: float, *, rate: float, least: float, most: float) -> float:
    """The distance nearest to ``wanted`` within a factor of 1 + ``rate`` from ``here``, and within [least, most]."""
    near = min(max(wanted, here / (1.0 + rate)), here * (1.0 + rate))
    return min(max(near, least), most)


def _most(schedule: Schedule, mask: MaskSpec, start: float) -> float:
    """The greatest distance of a bound that was configured at ``start``."""
    return max(start, min(schedule.ceiling * start, mask.entry.widest))


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
            values[name] = math.exp(sign * distance) if mask.entry.on_ratio else sign * distance
    return values
