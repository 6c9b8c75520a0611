"""Sums by bin over distances from agreement, and the distance at which they meet a target; pure functions.

The distance of a unit is the width of the tightest bound that keeps it: in nats of log ratio for aggregates that are
ratios, in the aggregate's unit for others, and the log for a weight. Bins are the same everywhere, so the histogram of
a batch is the sum of those of its micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from ...correction import Reduction, Statistic
from ...correction.moving_bounds import WEIGHT
from ...correction.ratios import EXP_CLAMP

_PER_DECADE: Final = 64
EDGES: Final = tuple(10 ** (i / _PER_DECADE) for i in range(-7 * _PER_DECADE, 3 * _PER_DECADE + 1))
"""Upper edge of each bin of a mask except the last, 1e-7 to 1e3, 3.7 % apart; the last bin holds larger distances."""
CAPS: Final = tuple(
    10 ** (i / _PER_DECADE) for i in range(-5 * _PER_DECADE, math.floor(_PER_DECADE * math.log10(EXP_CLAMP)) + 1)
)
"""Log of the largest weight of each bin except the last, in nats, 1e-5 to 19.8; the first holds smaller ones too."""

DISTANCE, NOISE, KEPT = "distance", "noise", "kept"
"""Statistics of a mask, below its name: distances and backend noise by bin, and the share that its bounds kept."""
WEIGHT_SUMS = (f"{WEIGHT}/tokens", f"{WEIGHT}/total", f"{WEIGHT}/square")
"""Statistics of the weight, by bin over tokens: sums of 1, of w and of w^2."""
UNITS, ESS = f"{WEIGHT}/units", f"{WEIGHT}/ess"
"""Statistics of the weight: the number of units that have a token, and the ESS under the current cap."""


@dataclass(frozen=True)
class Histogram:
    """Sums by bin; the last bin is beyond all edges.

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

        This also holds for an ESS: with n equal weights of which one is 0 it is 1 - 1 / n.
        """
        # In floats 10 * (1 - 0.9) is slightly below 1, but 10 units are enough.
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
    """Compute the smallest edge with at least ``share`` of the counts; infinite beyond all, NaN without counts."""
    total = sum(histogram.counts)
    if not total:
        return math.nan
    # Counts are whole numbers, so the margin covers only rounding: 0.98 of 50 is 49.
    wanted = share * total * (1 - 1e-12)
    within = next(place for place, below in enumerate(accumulate(histogram.counts)) if below >= wanted)
    return (*histogram.edges, math.inf)[within]


def find_keeping_distance(histogram: Histogram, share: float) -> float | None:
    """Find the distance that keeps ``share``; None if no bound keeps as much."""
    distance = compute_quantile(histogram, share)
    return distance if math.isfinite(distance) else None


def compute_ess_by_cap(histogram: Histogram) -> list[float]:
    """Compute the ESS under a cap at each edge, and last without a cap; NaN without tokens.

    The ESS is that of ``offpolicy/weight/ess``, (sum w)^2 / (n sum w^2) over tokens (Kish 1965, Survey Sampling): each
    token counts once, with the weight of its unit. A cap c replaces w by min(w, c). With c at an edge, lower weights
    enter by their sums and higher ones by their number, so the ESS is exact. A higher cap makes weights more unequal in
    the Lorenz order, in which the ESS is Schur-concave, so it decreases from each cap to the next.
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
        An edge; infinite if no cap is needed, 0 if no cap reaches the target, NaN without counts.
    """
    if not sum(histogram.counts):
        return math.nan
    # The margin covers rounding, so an ESS equal to the target reaches it.
    reached = (place for place, ess in enumerate(compute_ess_by_cap(histogram)) if ess >= target * (1 - 1e-12))
    widest = max(reached, default=None)
    return 0.0 if widest is None else (*histogram.edges, math.inf)[widest]


def sum_by_bin(edges: tuple[float, ...], distance: Tensor, columns: Tensor) -> Tensor:
    """Sum columns by the bin of their distance, on the device and without waiting for it.

    Args:
        distance: any shape; NaN counts as beyond all edges.
        columns: (K, *shape).

    Returns:
        (K, len(edges) + 1) float64.
    """
    where = torch.bucketize(
        distance.double().nan_to_num(math.inf, posinf=math.inf), _build_edges(edges, distance.device)
    )
    # bincount would wait for the device to find the largest bin.
    sums = torch.zeros(len(columns), len(edges) + 1, dtype=torch.float64, device=distance.device)
    return sums.scatter_add_(1, where.flatten().expand(len(columns), -1), columns.flatten(1).double())


def get_reduction(name: str) -> Reduction:
    """Return the rule by which the statistic of this name is merged."""
    if name == ESS:
        return Reduction.ESS
    return Reduction.MEAN if name.endswith(f"/{KEPT}") else Reduction.SUM


@cache
def _build_edges(edges: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(edges, dtype=torch.float64, device=device)


def _read_parts(statistic: Statistic) -> list[float]:
    return [float(part) for part in statistic.parts]
