"""Histograms of distances from agreement, and pure functions that compute the next bounds from recent histograms.

The distance of a unit is the width of the tightest bound that keeps the unit. The distance is in nats of log ratio for
aggregates that are ratios, and in the aggregate's unit for other aggregates; for a weight, it is the log of the weight.
All histograms have the same bins, so the histogram of a batch is the sum of the histograms of its micro-batches and
ranks.

A bound is represented by its distance from agreement: |log bound| in nats for ratios and weights, |bound| for the other
aggregates. This distance moves towards the distance that meets the target, or towards the backend noise if the noise is
larger. It moves by a limited factor per change, and within a range around the configured distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final, Literal

import torch
from torch import Tensor

from ...correction import MaskSpec, Reduction, Statistic, WeightSpec
from ...correction.bounds import WEIGHT, Side
from ...correction.ratios import EXP_CLAMP

_PER_DECADE: Final = 64
EDGES: Final = tuple(10 ** (i / _PER_DECADE) for i in range(-7 * _PER_DECADE, 3 * _PER_DECADE + 1))
"""Upper edge of each bin of a mask except the last, 1e-7 to 1e3, 3.7 % apart; the last bin contains larger
distances."""
CAPS: Final = tuple(
    10 ** (i / _PER_DECADE) for i in range(-5 * _PER_DECADE, math.floor(_PER_DECADE * math.log10(EXP_CLAMP)) + 1)
)
"""Log of the largest weight of each bin except the last, in nats, 1e-5 to 19.8; the first bin also contains smaller
weights."""

DISTANCE, NOISE, KEPT = "distance", "noise", "kept"
"""Statistics of a mask, under its name: distances and backend noise by bin, and the share that its bounds kept."""
WEIGHT_SUMS = (f"{WEIGHT}/tokens", f"{WEIGHT}/total", f"{WEIGHT}/square")
"""Statistics of the weight, by bin over tokens: sums of 1, of w and of w^2."""
UNITS, ESS = f"{WEIGHT}/units", f"{WEIGHT}/ess"
"""Statistics of the weight: the number of units that have a token, and the ESS under the current cap."""


@dataclass(frozen=True)
class Histogram:
    """Sums by bin; the last bin lies beyond all edges.

    Attributes:
        edges: upper edge of each bin except the last.
        counts: number of units or tokens per bin.
        units: total number of units, or of tokens for a mask that decides per token.
        total, square: sums of w and w^2 per bin over tokens, for weights.
    """

    edges: Sequence[float]
    counts: Sequence[float]
    units: float
    total: Sequence[float] = ()
    square: Sequence[float] = ()

    def resolves(self, target: float) -> bool:
        """Return True if there are enough units that a share of 1 - ``target`` is at least one unit.

        This also holds for an ESS: if one of n otherwise equal weights is 0, the ESS is 1 - 1 / n.
        """
        # In floating point, 10 * (1 - 0.9) is slightly below 1, but 10 units are enough.
        return self.units * (1.0 - target) >= 1.0 - 1e-9


def read_histogram(seen: Mapping[str, Statistic], name: str) -> Histogram | None:
    """Read ``<mask>/distance``, ``<mask>/noise`` or ``WEIGHT`` of merged statistics; None if it was not reported."""
    if (UNITS if name == WEIGHT else name) not in seen:
        return None
    if name != WEIGHT:
        counts = _read_parts(seen[name])
        return Histogram(EDGES, counts, sum(counts))
    tokens, total, square = (_read_parts(seen[each]) for each in WEIGHT_SUMS)
    return Histogram(CAPS, tokens, _read_parts(seen[UNITS])[0], total, square)


def count_bins(name: str) -> int:
    """Count the bins of ``<mask>/distance``, ``<mask>/noise`` or a statistic of the weight.

    Example:
        >>> count_bins("gsm/distance") - len(EDGES), count_bins(UNITS)
        (1, 1)
    """
    return len(CAPS) + 1 if name in WEIGHT_SUMS else 1 if name == UNITS else len(EDGES) + 1


def compute_quantile(histogram: Histogram, share: float) -> float:
    """Compute the smallest edge that covers ``share`` of the counts; infinite if no edge does, NaN without counts."""
    total = sum(histogram.counts)
    if not total:
        return math.nan
    # Counts are whole numbers, so the margin covers only rounding errors: 0.98 of 50 is 49.
    wanted = share * total * (1 - 1e-12)
    within = next(place for place, below in enumerate(accumulate(histogram.counts)) if below >= wanted)
    return (*histogram.edges, math.inf)[within]


def find_keeping_distance(histogram: Histogram, share: float) -> float | None:
    """Find the distance at which bounds keep ``share``; None if no bound keeps that much."""
    distance = compute_quantile(histogram, share)
    return distance if math.isfinite(distance) else None


def compute_ess_by_cap(histogram: Histogram) -> list[float]:
    """Compute the ESS under a cap at each edge and, as the last value, without a cap; NaN without tokens.

    The ESS is that of ``offpolicy/weight/ess``, (sum w)^2 / (n sum w^2) over tokens (Kish 1965, Survey Sampling): each
    token counts once, with the weight of its unit. A cap c replaces w with min(w, c). If c is at an edge, lower weights
    contribute their sums and higher weights their number, so the ESS is exact. A higher cap makes weights more unequal
    in the Lorenz order, and the ESS is Schur-concave in this order. The ESS therefore decreases from each cap to the
    next.
    """
    count = sum(histogram.counts)
    if not count:
        return [math.nan] * (len(histogram.edges) + 1)
    found = []
    below = zip(*map(accumulate, (histogram.counts, histogram.total, histogram.square)), strict=True)
    for cap, (inside, total, square) in zip((*map(math.exp, histogram.edges), 0.0), below, strict=True):
        weights, squares = total + (count - inside) * cap, square + (count - inside) * cap * cap
        found.append(weights * weights / (count * squares))
    return found


def find_widest_cap(histogram: Histogram, target: float) -> float:
    """Find the log of the largest cap under which the ESS is >= ``target``.

    Returns:
        An edge; infinite if no cap is needed, 0 if no cap reaches the target, and NaN without counts.
    """
    if not sum(histogram.counts):
        return math.nan
    # The margin covers rounding, so an ESS equal to the target reaches it.
    reached = (place for place, ess in enumerate(compute_ess_by_cap(histogram)) if ess >= target * (1 - 1e-12))
    widest = max(reached, default=None)
    return 0.0 if widest is None else (*histogram.edges, math.inf)[widest]


def sum_by_bin(edges: tuple[float, ...], distance: Tensor, columns: Tensor) -> Tensor:
    """Sum columns by the bin of their distance, on the device, without waiting for the result.

    Args:
        distance: any shape; NaN counts as beyond all edges.
        columns: (K, *shape).

    Returns:
        (K, len(edges) + 1) float64.
    """
    where = torch.bucketize(
        distance.double().nan_to_num(math.inf, posinf=math.inf), _build_edges(edges, distance.device)
    )
    # bincount would have to wait until the device has found the largest bin.
    sums = torch.zeros(len(columns), len(edges) + 1, dtype=torch.float64, device=distance.device)
    return sums.scatter_add_(1, where.flatten().expand(len(columns), -1), columns.flatten(1).double())


def get_reduction(name: str) -> Reduction:
    """Return the reduction with which the statistic of this name is merged."""
    if name == ESS:
        return Reduction.ESS
    return Reduction.MEAN if name.endswith(f"/{KEPT}") else Reduction.SUM


@cache
def _build_edges(edges: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(edges, dtype=torch.float64, device=device)


def _read_parts(statistic: Statistic) -> list[float]:
    return [float(part) for part in statistic.parts]


@dataclass(frozen=True)
class Schedule:
    """Rule by which the bounds of a mask, or the cap of the weight, are moved.

    Attributes:
        find_goal: returns the distance that meets the target, from a histogram; None if no moving bound meets it.
        target: share that a mask must keep of the units to which it applies, or the ESS of the weights.
        side: which bounds move.
        rate: a distance changes by a factor of at most 1 + rate per change.
        floor, ceiling: range of a distance, in multiples of the configured distance.
        noise_kept: share of units at equal weights that must survive backend noise alone, once the rate allows it; None
            for a weight, because it drops nothing.
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
    """Compute the next bounds of a part, by key; return the current bounds if there are too few units."""
    distances, start = compute_distances(current), compute_distances(configured)
    goal, reach = _find_goal(schedule, seen), _find_reach(schedule, noise)
    # A cap without a goal is not moved, even if it is out of range after a resume.
    stays = goal is None and schedule.noise_kept is None
    for name in () if stays else find_moving_sides(configured, schedule.side):
        here = distances[name]
        # Without rows at equal weights, the noise is unknown, and a narrower bound might fall below it.
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
    """Find what prevents the bounds from reaching their target; return a message for each kind of obstacle.

    ``floor``: even the lowest cap in range leaves a lower ESS; an ESS above the target is no obstacle. ``share``: no
    moving bound keeps the target share. ``noise``: backend noise exceeds a bound. ``ceiling``: backend noise exceeds
    the range of a bound.
    """
    found: dict[str, str] = {}
    goal, reach = _find_goal(schedule, seen), _find_reach(schedule, noise)
    start, distances = compute_distances(configured), compute_distances(current)
    if isinstance(configured, WeightSpec):
        least = schedule.floor * start["upper"]
        # The sums only show that the ESS at the floor is at most the ESS at the next lower edge.
        if goal is not None and goal < max((cap for cap in CAPS if cap <= least), default=0.0):
            found["floor"] = (
                f"even a cap of {math.exp(least):.4g}, the lowest in range, leaves an ESS below {schedule.target:g}: "
                "so the cap is clamped there. Set a lower offpolicy.calibrate.floor, a lower target_ess, or a lower "
                "bound in addition to the cap, correction.weight.kind=clip, because no cap raises small weights."
            )
        return found
    if goal is None and seen.resolves(schedule.target):
        found["share"] = (
            f"{seen.counts[-1]:.0f} of the {sum(seen.counts):.0f} units to which the mask applies are beyond a fixed "
            f"bound, or beyond any bound, so no moving bound keeps a share of {schedule.target:g}; the bounds stay as "
            "they are. "
            "Widen the fixed bound, or set "
            f"offpolicy.calibrate.side=both, or a lower target_kept."
        )
    for name in find_moving_sides(configured, schedule.side):
        here, most = distances[name], _compute_most(schedule, current, start[name])
        alone = here if goal is None else _approach(goal, schedule, current, here, start[name])
        # The margin covers rounding errors of a bound that lies exactly at the limit of the noise.
        if reach is None or reach <= min(here, alone) * (1 + 1e-9):
            continue
        cause = (
            f"backend noise alone reaches {reach:.4g}, if a share of {schedule.noise_kept:g} must be kept at equal "
            "weights"
        )
        if reach > most * (1 + 1e-9):
            found["ceiling"] = (
                f"{cause}, but the {name} bound is clamped at {most:.4g}, so it already rejects noise. Set a wider "
                "bound, "
                f"or a higher offpolicy.calibrate.ceiling, or reduce the engines' mismatch."
            )
        else:
            found["noise"] = (
                f"{cause}, but the {name} bound is at {here:.4g}: it widens by a factor of at most "
                f"{1 + schedule.rate:g} per change, whatever offpolicy.calibrate.target_kept requires."
            )
    return found


def find_moving_sides(part: MaskSpec | WeightSpec, side: Side) -> tuple[Literal["lower", "upper"], ...]:
    """Find the bounds of ``side`` that can move: those that are set and differ from the point of agreement."""
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
    """Build a part's bounds, by key, from distances; a bound that has not moved keeps exactly the same bits."""
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
    """Compute the distance closest to ``wanted`` that the rate, and the range around ``start``, allow."""
    near = min(max(wanted, here / (1.0 + schedule.rate)), here * (1.0 + schedule.rate))
    return min(max(near, schedule.floor * start), _compute_most(schedule, part, start))


def _compute_most(schedule: Schedule, part: MaskSpec | WeightSpec, start: float) -> float:
    widest = CAPS[-1] if isinstance(part, WeightSpec) else part.entry.widest
    return max(start, min(schedule.ceiling * start, widest))
