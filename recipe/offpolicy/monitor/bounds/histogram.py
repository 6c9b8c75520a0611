"""How far the units that a mask decides by lie from agreement, counted so that micro-batches and ranks add up.

The distance of a unit is how wide a bound has to be to keep it: in nats of log ratio for aggregates that are ratios,
in the aggregate's own units for the others. A mask that picks tokens by the sign of their own advantage can keep some
tokens of a unit and drop others, so that tokens are counted, each with the distance of its unit. Bins are the same
everywhere, so that the histogram of a whole batch is the sum of those of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Final, Literal

import torch
from torch import Tensor

from ...correction import CorrectionSpec, MaskSpec, Reduction, Statistic
from ...correction.deferred import DeferredValue, fetch
from ...correction.masks import compute_extremes, find_applicable
from ...correction.moving_bounds import WEIGHT, Side
from ...correction.ratios import compute_log_ratio, find_valid_tokens
from ...correction.units import Units, partition_units
from .cap_histogram import ESS, cap_sums

_PER_DECADE: Final = 64
_DECADES: Final = (-7, 3)
EDGES: Final = tuple(10 ** (i / _PER_DECADE) for i in range(_PER_DECADE * _DECADES[0], _PER_DECADE * _DECADES[1] + 1))
"""Greatest distance of each bin but the last, 1e-7 to 1e3, 3.7 % apart; the last bin holds what lies beyond."""

DISTANCE, NOISE, KEPT = "distance", "noise", "kept"
"""What is counted of a mask: a histogram of distances, one of backend noise, and the share that its bounds kept."""


@torch.no_grad()
def measured(
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
    """What rows of one update show of the parts that ``sides`` names, see the stages for the arguments.

    What is counted, units or tokens (``MaskSpec.picks_tokens``), is counted where the mask looks: of a mask for
    negative advantages, units of rows whose mean is, or tokens whose own is. What lies beyond a bound on the side that
    does not move counts as infinitely far. Backend noise is the distance of pi_old / mu where both have the same
    weights, staleness 0 or None, for masks on pi / mu; its rows count whatever their advantage is, but for those beyond
    a bound that does not move, which no other bound can keep.

    Returns:
        Read: ``<mask>/distance``, ``<mask>/kept``, and ``<mask>/noise`` for masks on pi / mu; of a weight, where
        ``sides`` has ``WEIGHT``, what ``online_cap_histogram.cap_sums`` counts.
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
        counted |= cap_sums(spec.weight, operands[spec.weight.ratio][0], units)
    for name, mask in spec.masks:
        if name not in sides:
            continue
        units = partition_units(mask.level, valid, ids.get(mask.level))
        there = valid if mask.picks_tokens else units.tokens > 0
        at = valid & find_applicable(mask, advantages, valid)
        looked = at if mask.picks_tokens else units.greatest(at.double()) > 0
        below, above = _compared(mask, units, *operands[mask.ratio])
        lower, upper = mask.limits
        inside = (below >= lower) & (above <= upper)
        counted[f"{name}/{KEPT}"] = torch.stack([(inside & looked).sum(), looked.sum()]).double()
        fixed = _beyond_fixed(mask, sides[name], below, above)
        distance = _distance(mask, sides[name], below, above)
        counted[f"{name}/{DISTANCE}"] = _counts(distance.masked_fill(fixed, float("inf")), looked)
        if mask.ratio == "full":
            equal = there if staleness is None else there & (staleness == 0)[:, None]
            noise = _compared(mask, units, *operands["rollout"])
            movable = equal & ~_beyond_fixed(mask, sides[name], *noise)
            counted[f"{name}/{NOISE}"] = _counts(_distance(mask, sides[name], *noise), movable)
    return _read(counted)


def _compared(
    mask: MaskSpec, units: Units, log_value: Tensor, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor]:
    """``masks.compute_extremes`` in float32, as the mask compares: (B, U) each, (B, T) where it picks tokens."""
    least, greatest = compute_extremes(mask, units, log_value, numerator=numerator, denominator=denominator)
    if mask.picks_tokens:
        least, greatest = units.spread(least), units.spread(greatest)
    return least.float(), greatest.float()


def moving_sides(mask: MaskSpec, side: Side) -> tuple[Literal["lower", "upper"], ...]:
    """Which bounds of a mask move: those of ``side`` that are set, and away from agreement."""
    lower, upper = mask.limits
    numbers = {"lower": -lower, "upper": upper}
    wanted: tuple[Literal["lower", "upper"], ...] = ("lower", "upper") if side == "both" else (side,)
    return tuple(name for name in wanted if 0 < numbers[name] < float("inf"))


def histogram(distance: Tensor, counted: Tensor) -> Statistic:
    """How many of the ``counted`` units lie in each bin, in floats; a NaN is beyond them all.

    Args:
        distance: any shape, >= 0.
        counted: bool of that shape.
    """
    (counts,) = fetch([DeferredValue(_counts(distance, counted), tuple)])
    return Statistic(Reduction.SUM, counts)


def _counts(distance: Tensor, counted: Tensor) -> Tensor:
    """As ``histogram``: (len(EDGES) + 1,) float64, where the distances are."""
    edges = _edges(distance.device)
    where = torch.bucketize(distance.double().nan_to_num(float("inf"), posinf=float("inf")), edges)
    # bincount would wait for the device, to see the greatest bin.
    counts = torch.zeros(len(EDGES) + 1, dtype=torch.float64, device=distance.device)
    return counts.scatter_add_(0, where.flatten(), counted.flatten().double())


@cache
def _edges(device: torch.device) -> Tensor:
    return torch.tensor(EDGES, dtype=torch.float64, device=device)


def _read(counted: Mapping[str, Tensor]) -> DeferredValue[dict[str, Statistic]]:
    """Vectors of counts as statistics."""
    sizes = {name: len(counts) for name, counts in counted.items()}

    def decode(numbers: list[float]) -> dict[str, Statistic]:
        found, start = {}, 0
        for name, size in sizes.items():
            found[name], start = Statistic(reduction_of(name), tuple(numbers[start : start + size])), start + size
        return found

    return DeferredValue(torch.cat(list(counted.values())) if counted else torch.zeros(0, dtype=torch.float64), decode)


def reduction_of(name: str) -> Reduction:
    """How what is counted under this name adds up."""
    if name == ESS:
        return Reduction.ESS
    return Reduction.MEAN if name.endswith(f"/{KEPT}") else Reduction.SUM


def quantile(counts: Sequence[float | Tensor], share: float) -> float:
    """The least edge that ``share`` or more of what was counted lies within.

    Returns:
        Infinite for what lies beyond the last edge, NaN where nothing was counted.
    """
    numbers = [float(count) for count in counts]
    total = sum(numbers)
    if not total:
        return float("nan")
    # Counts are whole, so that a share of them is missed by rounding alone: 0.98 of 50 is 49.
    wanted = share * total * (1 - 1e-12)
    within = next(place for place, below in enumerate(accumulate(numbers)) if below >= wanted)
    return EDGES[within] if within < len(EDGES) else float("inf")


def _distance(mask: MaskSpec, side: Side, below: Tensor, above: Tensor) -> Tensor:
    """How wide the bounds that move have to be, by unit."""
    moving = moving_sides(mask, side)
    distance = torch.zeros_like(above)
    if "upper" in moving:
        distance = torch.maximum(distance, above)
    if "lower" in moving:
        distance = torch.maximum(distance, -below)
    return distance


def _beyond_fixed(mask: MaskSpec, side: Side, below: Tensor, above: Tensor) -> Tensor:
    """Whether a bound that does not move rejects, by unit."""
    moving = moving_sides(mask, side)
    lower, upper = mask.limits
    beyond = torch.zeros_like(above, dtype=torch.bool)
    if "upper" not in moving:
        beyond = beyond | (above > upper)
    if "lower" not in moving:
        beyond = beyond | (below < lower)
    return beyond
