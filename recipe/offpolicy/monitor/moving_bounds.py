"""Moving bounds: histograms of distances from agreement, and the next bounds, computed from recent histograms.

The distance of a unit is the width of the tightest bound that keeps the unit. The distance is in nats of log ratio for
aggregates that are ratios, and in the aggregate's unit for other aggregates; for a weight, it is the log of the weight.
All histograms have the same bins, so the histogram of a batch is the sum of the histograms of its micro-batches and
ranks.

A bound is represented by its distance from agreement: |log bound| in nats for ratios and weights, |bound| for the other
aggregates. This distance moves towards the distance that meets the target, or towards the backend noise if the noise is
larger. Each change multiplies the distance by a limited factor, and the distance stays within a range around the
configured one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, islice
from typing import Final, Literal

import torch
from torch import Tensor

from ..correction import CorrectionSpec, MaskSpec, Reduction, Statistic, WeightSpec
from ..correction.masks import compute_extremes
from ..correction.ratios import EXP_CLAMP, clamp_and_exp, compute_excess, compute_log_ratio, find_valid_tokens
from ..correction.spec import WEIGHT, Side
from ..correction.statistics import DeferredValue
from ..correction.units import Units, find_applicable, partition_units
from ..correction.weights import compute_log_weight

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
    """Sums by bin; the last bin contains the values beyond the last edge.

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
    names = (*WEIGHT_SUMS, UNITS) if name == WEIGHT else (name,)
    counts, *sums = ([float(part) for part in seen[each].parts] for each in names)
    if name != WEIGHT:
        return Histogram(EDGES, counts, sum(counts))
    total, square, (units,) = sums
    return Histogram(CAPS, counts, units, total, square)


def count_bins(name: str) -> int:
    """Count the bins of ``<mask>/distance``, ``<mask>/noise`` or a statistic of the weight."""
    return len(CAPS) + 1 if name in WEIGHT_SUMS else 1 if name == UNITS else len(EDGES) + 1


def compute_quantile(histogram: Histogram, share: float) -> float:
    """Compute the smallest edge that covers ``share`` of the counts; infinite if no edge does, NaN without counts."""
    if not (total := sum(histogram.counts)):
        return math.nan
    # Counts are whole numbers, so the margin covers only rounding errors: 0.98 of 50 is 49.
    wanted = share * total * (1 - 1e-12)
    below = zip((*histogram.edges, math.inf), accumulate(histogram.counts), strict=True)
    return next(edge for edge, count in below if count >= wanted)


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
    if not (count := sum(histogram.counts)):
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
    # The margin covers rounding, so that an ESS equal to the target meets the target.
    by_cap = zip((*histogram.edges, math.inf), compute_ess_by_cap(histogram), strict=True)
    return max((cap for cap, ess in by_cap if ess >= target * (1 - 1e-12)), default=0.0)


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


def count_by_bin(distance: Tensor, counted: Tensor) -> Tensor:
    """Compute a histogram, by distance, of the units of a mask that ``counted`` flags; (len(EDGES) + 1,) float64."""
    return sum_by_bin(EDGES, distance, counted[None])[0]


def get_reduction(name: str) -> Reduction:
    """Return the reduction with which the statistic of this name is merged."""
    if name == ESS:
        return Reduction.ESS
    return Reduction.MEAN if name.endswith(f"/{KEPT}") else Reduction.SUM


@cache
def _build_edges(edges: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(edges, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Schedule:
    """Rule that moves the bounds of a mask, or the cap of the weight.

    Attributes:
        find_goal: returns the distance that meets the target, from a histogram; None if no moving bound meets it.
        target: share that a mask must keep of the units to which it applies, or the ESS of the weights.
        side: which bounds move.
        rate: a distance changes by a factor of at most 1 + rate per change.
        floor, ceiling: range of a distance, in multiples of the configured distance.
        noise_kept: share of units at equal weights that the bound must keep despite backend noise, as soon as the rate
            allows it; None for a weight, because a weight does not drop units.
    """

    find_goal: Callable[[Histogram, float], float | None]
    target: float
    side: Side
    rate: float
    floor: float
    ceiling: float
    noise_kept: float | None


@dataclass(frozen=True)
class Evidence:
    """The inputs from which the next bounds of a part are computed.

    Attributes:
        configured, current: the part with its configured and with its current bounds.
        seen: distances of its units over the most recent updates, or sums of weights.
        noise: distances of units at equal weights; None if they do not matter.
    """

    schedule: Schedule
    configured: MaskSpec | WeightSpec
    current: MaskSpec | WeightSpec
    seen: Histogram
    noise: Histogram | None = None

    @property
    def goal(self) -> float | None:
        """The distance that meets the target; None if too little was counted, or no distance meets it."""
        target = self.schedule.target
        return self.schedule.find_goal(self.seen, target) if self.seen.resolves(target) else None

    @property
    def reach(self) -> float | None:
        """The distance that backend noise reaches: 0 if it does not matter, None if unknown."""
        kept = self.schedule.noise_kept
        if self.noise is None or kept is None:
            return 0.0
        return compute_quantile(self.noise, kept) if self.noise.resolves(kept) else None

    def compute_next_bounds(self) -> dict[str, float | None]:
        """Compute the next bounds of the part, by key; return the current bounds if there are too few units."""
        distances, goal, reach = compute_distances(self.current), self.goal, self.reach
        # A cap without a goal is not moved, even if it is out of range after a resume.
        stays = goal is None and self.schedule.noise_kept is None
        for name in () if stays else find_moving_sides(self.configured, self.schedule.side):
            here = distances[name]
            # Without rows at equal weights, the noise is unknown, and a narrower bound might fall below it.
            distances[name] = self._approach(
                name, max(here if goal is None else goal, here if reach is None else reach)
            )
        return build_bounds(self.current, distances)

    def find_obstacles(self) -> dict[str, str]:
        """Find what prevents the bounds from reaching their target; return a message for each kind of obstacle.

        ``floor``: even the lowest allowed cap yields an ESS below the target; an ESS above the target is not an
        obstacle. ``share``: no moving bound keeps the target share. ``noise``: backend noise exceeds a bound.
        ``ceiling``: backend noise exceeds the range of a bound.
        """
        found: dict[str, str] = {}
        schedule, seen, goal, reach = self.schedule, self.seen, self.goal, self.reach
        if isinstance(self.configured, WeightSpec):
            least = schedule.floor * compute_distances(self.configured)["upper"]
            # The sums only show that the ESS at the floor is at most the ESS at the next lower edge.
            if goal is not None and goal < max((cap for cap in CAPS if cap <= least), default=0.0):
                found["floor"] = (
                    f"the lowest allowed cap, {math.exp(least):.4g}, still yields an ESS below {schedule.target:g}, so "
                    f"the cap is clamped there. Reduce offpolicy.calibrate.floor or "
                    "target_ess. No cap raises small weights; correction.weight.kind=clip also bounds them from below."
                )
            return found
        if goal is None and seen.resolves(schedule.target):
            found["share"] = (
                f"{seen.counts[-1]:.0f} of the {sum(seen.counts):.0f} units to which the mask applies are beyond a "
                f"fixed bound, or beyond any bound, so no moving bound keeps a share of {schedule.target:g}; the "
                f"bounds are not changed. Widen the fixed bound, or set offpolicy.calibrate.side=both, or a lower "
                "target_kept."
            )
        for name in find_moving_sides(self.configured, schedule.side):
            here, most = compute_distances(self.current)[name], self._most(name)
            alone = here if goal is None else self._approach(name, goal)
            # The margins cover rounding errors of a bound that lies exactly at the limit of the noise.
            if reach is None or reach <= min(here, alone) * (1 + 1e-9):
                continue
            cause = (
                f"backend noise alone reaches {reach:.4g}, if a share of {schedule.noise_kept:g} must be kept at equal "
                "weights"
            )
            if reach > most * (1 + 1e-9):
                found["ceiling"] = (
                    f"{cause}, but the {name} bound is clamped at {most:.4g}, so it already rejects noise. Set a wider "
                    "bound, or a higher offpolicy.calibrate.ceiling, or reduce the engines' mismatch."
                )
            else:
                found["noise"] = (
                    f"{cause}, but the {name} bound is at {here:.4g}: it widens by a factor of at most "
                    f"{1 + schedule.rate:g} per change, whatever offpolicy.calibrate.target_kept requires."
                )
        return found

    def _approach(self, name: str, wanted: float) -> float:
        """Compute the distance closest to ``wanted`` that the rate, and the range of the schedule, allow."""
        here, factor = compute_distances(self.current)[name], 1.0 + self.schedule.rate
        near = min(max(wanted, here / factor), here * factor)
        return min(max(near, self.schedule.floor * compute_distances(self.configured)[name]), self._most(name))

    def _most(self, name: str) -> float:
        start = compute_distances(self.configured)[name]
        widest = CAPS[-1] if isinstance(self.current, WeightSpec) else self.current.entry.widest
        return max(start, min(self.schedule.ceiling * start, widest))


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
    """Build a part's bounds, by key, from distances; a bound that has not moved stays bitwise identical."""
    before = compute_distances(part)
    if isinstance(part, WeightSpec):
        return {"upper": part.upper if distances["upper"] == before["upper"] else math.exp(distances["upper"])}
    if part.delta is not None:
        return {"delta": part.delta if distances["lower"] == before["lower"] else distances["lower"]}
    values: dict[str, float | None] = {"lower": part.lower, "upper": part.upper}
    for name, sign in (("lower", -1.0), ("upper", 1.0)):
        distance = sign * distances[name]
        if distances[name] != before[name] and math.isfinite(distance):
            values[name] = math.exp(distance) if part.entry.on_ratio else distance
    return values


@torch.no_grad()
def defer_histograms(
    spec: CorrectionSpec,
    sides: Mapping[str, Side],
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    segment_ids: Tensor | None = None,
    versions: Tensor | None = None,
    staleness: Tensor | None = None,
) -> DeferredValue[dict[str, Statistic]]:
    """Measure rows of one update for the parts in ``sides``; ``correction.stages`` explains the arguments.

    Units are counted where the mask applies. Masks that select by the sign of each token can split a unit, so tokens
    are counted instead (``MaskSpec.picks_tokens``). For ``when=negative``, the counted units are those of rows with a
    negative mean advantage, or the tokens with a negative advantage. Units that a fixed bound rejects have an infinite
    distance. For masks on pi / mu, backend noise is the distance of pi_old / mu at equal weights (staleness 0 or None).
    It is measured on rows of any advantage, except for units beyond a fixed bound, because no other bound can keep
    these units.

    Returns:
        When the result is read: ``<mask>/distance``, ``<mask>/kept``, and ``<mask>/noise`` for masks on pi / mu; if
        ``WEIGHT`` is in ``sides``, also the sums of weights.
    """
    valid = find_valid_tokens(response_mask, old_log_prob, rollout_log_prob)
    log_rho = compute_log_ratio(old_log_prob, rollout_log_prob, valid)
    log_r = compute_log_ratio(log_prob, old_log_prob, valid)
    operands = {
        "rollout": (log_rho, old_log_prob, rollout_log_prob),
        "full": (log_rho + log_r, log_prob, rollout_log_prob),
        "ppo": (log_r, log_prob, old_log_prob),
    }
    ids = {"turn": segment_ids, "version": versions}
    counted: dict[str, Tensor] = {}
    if spec.weight is not None and WEIGHT in sides:
        units = partition_units(spec.weight.level, valid, ids.get(spec.weight.level))
        counted |= _sum_weights(spec.weight, operands[spec.weight.ratio][0], units)
    for name, mask in spec.masks:
        if name not in sides:
            continue
        units = partition_units(mask.level, valid, ids.get(mask.level))
        at = valid & find_applicable(mask, advantages, valid, log_ratio=operands[mask.ratio][0], turns=segment_ids)
        looked = at if mask.picks_tokens else units.greatest(at.double()) > 0
        below, above = _compute_extremes(mask, units, *operands[mask.ratio])
        lower, upper = mask.limits
        inside = (below >= lower) & (above <= upper)
        counted[f"{name}/{KEPT}"] = torch.stack([(inside & looked).sum(), looked.sum()]).double()
        distance, fixed = _compute_distance(mask, sides[name], below, above)
        counted[f"{name}/{DISTANCE}"] = count_by_bin(distance.masked_fill(fixed, math.inf), looked)
        if mask.ratio == "full":
            there = valid if mask.picks_tokens else units.exists
            equal = there if staleness is None else there & _find_fresh(staleness, units, mask.picks_tokens)
            noise, fixed = _compute_distance(mask, sides[name], *_compute_extremes(mask, units, *operands["rollout"]))
            counted[f"{name}/{NOISE}"] = count_by_bin(noise, equal & ~fixed)
    sizes = {name: len(numbers) for name, numbers in counted.items()}

    def decode(numbers: list[float]) -> dict[str, Statistic]:
        rest = iter(numbers)
        return {name: Statistic(get_reduction(name), tuple(islice(rest, size))) for name, size in sizes.items()}

    flat = torch.cat(list(counted.values())) if counted else torch.zeros(0, dtype=torch.float64)
    return DeferredValue(flat, decode)


def _find_fresh(staleness: Tensor, units: Units, by_token: bool) -> Tensor:
    """Return a bool mask of units or tokens sampled only by the current weights; (B, 1) if ages are known per row."""
    by_row = staleness.dim() == 1
    return (staleness == 0)[:, None] if by_row else staleness == 0 if by_token else units.greatest(staleness) <= 0


def _sum_weights(spec: WeightSpec, log_ratio: Tensor, units: Units) -> dict[str, Tensor]:
    """Sum the weights of some rows by bin, with the lower bound but no cap, and the terms of the ESS under the cap.

    Args:
        spec: weight that truncates or clips.
        log_ratio: (B, T) float64, log r_t in nats, 0 where not valid.
        units: units of ``spec.level``.
    """
    value = compute_log_weight(spec, log_ratio, units)
    if spec.lower is not None:
        value = value.clamp(min=math.log(spec.lower))
    count = units.sharing
    raw = clamp_and_exp(value)
    sums = sum_by_bin(CAPS, value, torch.stack([count, count * raw, count * raw.square()]))
    capped = value if spec.upper is None else value.clamp(max=math.log(spec.upper))
    above = compute_excess(capped)
    return {
        **dict(zip(WEIGHT_SUMS, sums, strict=True)),
        UNITS: (count > 0).sum(dtype=torch.float64)[None],
        ESS: torch.stack([(count * above).sum(), (count * above.square()).sum(), count.sum()]),
    }


def _compute_extremes(
    mask: MaskSpec, units: Units, log_value: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``masks.compute_extremes`` in float64, like the mask: (B, U), or (B, T) if the mask selects tokens."""
    least, greatest = compute_extremes(mask, units, log_value, numerator=numerator, denominator=denominator)
    if mask.picks_tokens:
        least, greatest = units.spread(least), units.spread(greatest)
    return least.float(), greatest.float()


def _compute_distance(mask: MaskSpec, side: Side, below: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """For each unit, compute the required width of the moving bounds, and whether a fixed bound rejects it."""
    moving = find_moving_sides(mask, side)
    lower, upper = mask.limits
    distance, fixed = torch.zeros_like(above), torch.zeros_like(above, dtype=torch.bool)
    for name, outward, limit in (("upper", above, upper), ("lower", -below, -lower)):
        if name in moving:
            distance = torch.maximum(distance, outward)
        else:
            fixed = fixed | (outward > limit)
    return distance, fixed
