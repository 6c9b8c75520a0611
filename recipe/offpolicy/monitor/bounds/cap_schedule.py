"""The next cap of a weight, from what its raw weights would have for an ESS under any cap; pure.

The cap is its log in nats, the distance from agreement, and moves as the bounds of masks do: by a bounded factor of
that distance a time and within a range around what was configured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...correction import WeightSpec
from .cap_histogram import CAPS, CapSums, widest_cap
from .mask_schedule import paced


@dataclass(frozen=True)
class CapSchedule:
    """How a cap moves; see ``online_settings`` for the keys.

    Attributes:
        target_ess: effective sample size that the weights are to have, a share of their number.
        rate: the log of the cap changes by a factor of at most 1 + rate a time.
        floor, ceiling: range of that log, in multiples of the configured one.
    """

    target_ess: float
    rate: float
    floor: float
    ceiling: float


def next_cap(
    schedule: CapSchedule, configured: WeightSpec, current: WeightSpec, sums: CapSums
) -> dict[str, float | None]:
    """The key that caps a weight, with its next value; the current one, to the bit, where there is too little to go by.

    Raises:
        ValueError: a weight without a cap above 1.
    """
    here, start = _distance(current), _distance(configured)
    if not _enough(schedule, sums):
        return {"upper": current.upper}
    most = max(start, min(schedule.ceiling * start, CAPS[-1]))
    goal = widest_cap(sums, schedule.target_ess)
    moved = paced(goal, here, rate=schedule.rate, least=schedule.floor * start, most=most)
    return {"upper": current.upper if moved == here else math.exp(moved)}


def cap_obstacles(schedule: CapSchedule, configured: WeightSpec, sums: CapSums) -> dict[str, str]:
    """What keeps the ESS below its target: kind of obstacle -> what is the matter, and what helps.

    ``floor``: even the lowest cap in range leaves less. That weights are more even than asked for is no obstacle.
    """
    if not _enough(schedule, sums):
        return {}
    least = schedule.floor * _distance(configured)
    # Of the ESS right at the floor the sums tell no more than that it is no greater than at the edge below.
    below = max((cap for cap in CAPS if cap <= least), default=0.0)
    if widest_cap(sums, schedule.target_ess) >= below:
        return {}
    return {
        "floor": (
            f"even a cap of {math.exp(least):.4g}, the lowest in range, leaves an ESS below "
            f"{schedule.target_ess:g}: it goes no lower. Set a lower offpolicy.calibrate.floor, a lower target_ess, or "
            f"a lower bound beside the cap, correction.weight.kind=clip: no cap lifts small weights."
        )
    }


def _enough(schedule: CapSchedule, sums: CapSums) -> bool:
    """Whether so many units were counted that one of them alone can cost what is to be given up.

    n equal weights of which one is 0 have an ESS of 1 - 1 / n.
    """
    return sum(sums.tokens) > 0 and sums.units * (1.0 - schedule.target_ess) >= 1.0 - 1e-9


def _distance(weight: WeightSpec) -> float:
    if weight.upper is None or weight.upper <= 1:
        raise ValueError(f"a cap of {weight.upper} is at no distance from agreement")
    return math.log(weight.upper)
