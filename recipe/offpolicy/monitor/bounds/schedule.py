"""The next bounds of a mask or a weight, from the histograms of the latest updates; pure functions.

A bound is its distance from agreement: |log bound| in nats for ratios and weights, |bound| for the other aggregates. It
moves towards the distance that meets the target, or to the backend noise if that is larger, by a limited factor per
change and within a range around the configured distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...correction import MaskSpec, WeightSpec
from ...correction.moving_bounds import Side
from .histogram import CAPS, Histogram, compute_quantile


@dataclass(frozen=True)
class Schedule:
    """Rule by which the bounds of a mask, or the cap of the weight, move.

    Attributes:
        find_goal: returns the distance that meets the target, from a histogram; None if no moving bound meets it.
        target: share that a mask keeps of the units it applies to, or ESS of the weights.
        side: bounds that move.
        rate: a distance changes by a factor of at most 1 + rate per change.
        floor, ceiling: range of a distance, in multiples of the configured one.
        noise_kept: share of units at equal weights that backend noise alone must not drop, once the rate allows it;
            None for a weight, which drops nothing.
    """

    find_goal: Callable[[Histogram, float], float | None]
    target: float
    side: Side
    rate: float
    floor: float
    ceiling: float
    noise_kept: float | None


def compute_next_bounds(
    schedule: Schedule,
    configured: MaskSpec | WeightSpec,
    current: MaskSpec | WeightSpec,
    seen: Histogram,
    noise: Histogram | None = None,
) -> dict[str, float | None]:
    """Compute the next bounds of a part, by key; the current ones if there are too few units."""
    distances, start = compute_distances(current), compute_distances(configured)
    goal, reach = _find_goal(schedule, seen), _find_reach(schedule, noise)
    # Without a goal, a cap stays, even if a resume has left it out of range.
    stays = goal is None and schedule.noise_kept is None
    for name in () if stays else find_moving_sides(configured, schedule.side):
        here = distances[name]
        # Without rows at equal weights the noise is unknown, and a narrower bound might fall below it.
        wanted = max(here if goal is None else goal, here if reach is None else reach)
        distances[name] = _approach(wanted, schedule, current, here, start[name])
    return build_bounds(current, distances)


def find_obstacles(
    schedule: Schedule,
    configured: MaskSpec | WeightSpec,
    current: MaskSpec | WeightSpec,
    seen: Histogram,
    noise: Histogram | None = None,
) -> dict[str, str]:
    """Find what keeps the bounds from their target: kind of obstacle -> its message.

    ``floor``: even the lowest cap in range leaves a lower ESS; an ESS above the target is no obstacle. ``share``: no
    moving bound keeps as much. ``noise``: backend noise is larger. ``ceiling``: it exceeds the range.
    """
    found: dict[str, str] = {}
    goal, reach = _find_goal(schedule, seen), _find_reach(schedule, noise)
    start, distances = compute_distances(configured), compute_distances(current)
    if isinstance(configured, WeightSpec):
        least = schedule.floor * start["upper"]
        # The sums only show that the ESS at the floor is at most that at the next lower edge.
        if goal is not None and goal < max((cap for cap in CAPS if cap <= least), default=0.0):
            found["floor"] = (
                f"even a cap of {math.exp(least):.4g}, the lowest in range, leaves an ESS below {schedule.target:g}: "
                f"bound clamped there. Set a lower offpolicy.calibrate.floor, a lower target_ess, or a lower bound in "
                f"addition to the cap, correction.weight.kind=clip: no cap raises small weights."
            )
        return found
    if goal is None and seen.resolves(schedule.target):
        found["share"] = (
            f"{seen.counts[-1]:.0f} of the {sum(seen.counts):.0f} it applies to are beyond a fixed bound, or beyond "
            f"any bound, so no bound keeps {schedule.target:g} of them: it stays. Widen the fixed bound, or set "
            f"offpolicy.calibrate.side=both, or a lower target_kept."
        )
    for name in find_moving_sides(configured, schedule.side):
        here, most = distances[name], _compute_most(schedule, current, start[name])
        alone = here if goal is None else _approach(goal, schedule, current, here, start[name])
        # The margin covers rounding, for a bound exactly at the end of the noise.
        if reach is None or reach <= min(here, alone) * (1 + 1e-9):
            continue
        cause = f"backend noise alone reaches {reach:.4g} where {schedule.noise_kept:g} of equal weights must be kept"
        if reach > most * (1 + 1e-9):
            found["ceiling"] = (
                f"{cause}, but the {name} bound is clamped at {most:.4g}: it already rejects noise. Set a wider bound, "
                f"or a higher offpolicy.calibrate.ceiling, or reduce the engines' mismatch."
            )
        else:
            found["noise"] = (
                f"{cause}, but the {name} bound is at {here:.4g}: it widens by a factor of at most "
                f"{1 + schedule.rate:g} per change, whatever offpolicy.calibrate.target_kept asks for."
            )
    return found


def find_moving_sides(part: MaskSpec | WeightSpec, side: Side) -> tuple[Literal["lower", "upper"], ...]:
    """Find the bounds of ``side`` that can move: those that are set and not at agreement."""
    distances = compute_distances(part)
    wanted: tuple[Literal["lower", "upper"], ...] = ("lower", "upper") if side == "both" else (side,)
    return tuple(name for name in wanted if 0 < distances[name] < math.inf)


def compute_distances(part: MaskSpec | WeightSpec) -> dict[str, float]:
    """Compute the distance of each bound from agreement; infinite for an open side, and for a weight's lower bound."""
    if isinstance(part, WeightSpec):
        return {"lower": math.inf, "upper": math.inf if part.upper is None else math.log(part.upper)}
    lower, upper = part.limits
    return {"lower": -lower, "upper": upper}


def build_bounds(part: MaskSpec | WeightSpec, distances: Mapping[str, float]) -> dict[str, float | None]:
    """Build the keys that bound a part from distances; a bound that has not moved is bitwise unchanged."""
    before = compute_distances(part)
    if isinstance(part, WeightSpec):
        return {"upper": part.upper if distances["upper"] == before["upper"] else math.exp(distances["upper"])}
    if part.delta is not None:
        return {"delta": part.delta if distances["lower"] == before["lower"] else distances["lower"]}
    values: dict[str, float | None] = {}
    for name, sign in (("lower", -1.0), ("upper", 1.0)):
        distance = distances[name]
        if distance == before[name] or math.isinf(distance):
            values[name] = getattr(part, name)
        else:
            values[name] = math.exp(sign * distance) if part.entry.on_ratio else sign * distance
    return values


def _find_goal(schedule: Schedule, seen: Histogram) -> float | None:
    """Find the distance that meets the target; None if too little was counted, or no distance meets it."""
    return schedule.find_goal(seen, schedule.target) if seen.resolves(schedule.target) else None


def _find_reach(schedule: Schedule, noise: Histogram | None) -> float | None:
    """Find the distance that backend noise reaches: 0 if it does not matter, None if unknown."""
    if noise is None or schedule.noise_kept is None:
        return 0.0
    return compute_quantile(noise, schedule.noise_kept) if noise.resolves(schedule.noise_kept) else None


def _approach(wanted: float, schedule: Schedule, part: MaskSpec | WeightSpec, here: float, start: float) -> float:
    """Compute the distance closest to ``wanted`` that the rate and the range around ``start`` allow."""
    near = min(max(wanted, here / (1.0 + schedule.rate)), here * (1.0 + schedule.rate))
    return min(max(near, schedule.floor * start), _compute_most(schedule, part, start))


def _compute_most(schedule: Schedule, part: MaskSpec | WeightSpec, start: float) -> float:
    widest = CAPS[-1] if isinstance(part, WeightSpec) else part.entry.widest
    return max(start, min(schedule.ceiling * start, widest))
