"""The next bounds of a mask or a weight, from the histograms of the latest updates; pure.

A bound is its distance from agreement: |log bound| in nats for ratios and weights, |bound| for the other aggregates. It
moves towards the distance that meets the target, or to the backend noise if that lies further out, by a bounded factor
a time and within a range around what was configured.
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
        find_goal: the distance that meets the target, of a histogram; None where no bound that moves meets it.
        target: share that a mask keeps of what it looks at, or ESS of the weights.
        side: bounds that move.
        rate: a distance changes by a factor of at most 1 + rate a time.
        floor, ceiling: range of a distance, in multiples of the configured one.
        noise_kept: share of units of equal weights that backend noise alone is not to drop, once the rate got there;
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
    """Compute the next bounds of a part, by key; the current ones where there are too few units."""
    distances, start = compute_distances(current), compute_distances(configured)
    goal, reach = _find_goal(schedule, seen), _find_reach(schedule, noise)
    # Of a cap nothing is known without a goal: it stays even where a resume has left it out of range.
    stays = goal is None and schedule.noise_kept is None
    for name in () if stays else find_moving_sides(configured, schedule.side):
        here = distances[name]
        # Without rows of equal weights nobody knows the noise, and a bound that narrows might get below it.
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

    ``floor``: even the lowest cap in range leaves a lower ESS; that weights are more even than asked for is none.
    ``share``: no bound that moves keeps so much. ``noise``: backend noise reaches further. ``ceiling``: so far that
    the bound must not follow.
    """
    found: dict[str, str] = {}
    goal, reach = _find_goal(schedule, seen), _find_reach(schedule, noise)
    start, distances = compute_distances(configured), compute_distances(current)
    if isinstance(configured, WeightSpec):
        least = schedule.floor * start["upper"]
        # Of the ESS right at the floor the sums tell no more than that it is no greater than at the edge below.
        if goal is not None and goal < max((cap for cap in CAPS if cap <= least), default=0.0):
            found["floor"] = (
                f"even a cap of {math.exp(least):.4g}, the lowest in range, leaves an ESS below {schedule.target:g}: "
                f"it goes no lower. Set a lower offpolicy.calibrate.floor, a lower target_ess, or a lower bound "
                f"beside the cap, correction.weight.kind=clip: no cap lifts small weights."
            )
        return found
    if goal is None and seen.resolves(schedule.target):
        found["share"] = (
            f"{seen.counts[-1]:.0f} of {sum(seen.counts):.0f} that it looks at lie beyond a bound that does not move, "
            f"or beyond any, so that no bound keeps {schedule.target:g} of them: it stays. Widen the one that does "
            f"not move, or set offpolicy.calibrate.side=both, or a lower target_kept."
        )
    for name in find_moving_sides(configured, schedule.side):
        here, most = distances[name], _compute_most(schedule, current, start[name])
        alone = here if goal is None else _approach(goal, schedule, current, here, start[name])
        if reach is None or reach <= min(here, alone) * (1 + 1e-9):
            continue
        cause = f"backend noise alone reaches {reach:.4g} where {schedule.noise_kept:g} of equal weights are to be kept"
        if reach > most * (1 + 1e-9):
            found["ceiling"] = (
                f"{cause}, and the {name} bound gets no further than {most:.4g}: it rejects for noise. Set a wider "
                f"bound, or a higher offpolicy.calibrate.ceiling, or bring the engines nearer to each other."
            )
        else:
            found["noise"] = (
                f"{cause}, and the {name} bound lies at {here:.4g}: it goes there by a factor of at most "
                f"{1 + schedule.rate:g} a time, and no nearer, whatever offpolicy.calibrate.target_kept asks for."
            )
    return found


def find_moving_sides(part: MaskSpec | WeightSpec, side: Side) -> tuple[Literal["lower", "upper"], ...]:
    """Find the bounds of ``side`` that can move: those that are set, and away from agreement."""
    distances = compute_distances(part)
    wanted: tuple[Literal["lower", "upper"], ...] = ("lower", "upper") if side == "both" else (side,)
    return tuple(name for name in wanted if 0 < distances[name] < math.inf)


def compute_distances(part: MaskSpec | WeightSpec) -> dict[str, float]:
    """Compute the distance of each bound from agreement; infinite where it is open, as is the lower one of a weight."""
    if isinstance(part, WeightSpec):
        return {"lower": math.inf, "upper": math.inf if part.upper is None else math.log(part.upper)}
    lower, upper = part.limits
    return {"lower": -lower, "upper": upper}


def build_bounds(part: MaskSpec | WeightSpec, distances: Mapping[str, float]) -> dict[str, float | None]:
    """Build the keys that bound a part from distances; a bound that has not moved stays to the bit."""
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
    """Find the distance that meets the target; None where too little was counted, or none meets it."""
    return schedule.find_goal(seen, schedule.target) if seen.resolves(schedule.target) else None


def _find_reach(schedule: Schedule, noise: Histogram | None) -> float | None:
    """Find the distance that backend noise reaches: 0 where it does not matter, None where it is not known."""
    if noise is None or schedule.noise_kept is None:
        return 0.0
    return compute_quantile(noise, schedule.noise_kept) if noise.resolves(schedule.noise_kept) else None


def _approach(wanted: float, schedule: Schedule, part: MaskSpec | WeightSpec, here: float, start: float) -> float:
    """Compute the distance nearest to ``wanted`` that the rate and the range around ``start`` allow."""
    near = min(max(wanted, here / (1.0 + schedule.rate)), here * (1.0 + schedule.rate))
    return min(max(near, schedule.floor * start), _compute_most(schedule, part, start))


def _compute_most(schedule: Schedule, part: MaskSpec | WeightSpec, start: float) -> float:
    widest = CAPS[-1] if isinstance(part, WeightSpec) else part.entry.widest
    return max(start, min(schedule.ceiling * start, widest))
