"""Histograms of one update, measured by the worker: distances by bin for masks, and sums by bin for weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...correction import CorrectionSpec, MaskSpec, Statistic, WeightSpec
from ...correction.bounds import WEIGHT, Side
from ...correction.deferred_value import DeferredValue
from ...correction.masks import compute_extremes, find_applicable
from ...correction.ratios import clamp_and_exp, compute_excess, compute_log_ratio, find_valid_tokens
from ...correction.units import Units, partition_units
from ...correction.weights import compute_log_weight
from .histogram import (
    CAPS,
    DISTANCE,
    EDGES,
    ESS,
    KEPT,
    NOISE,
    UNITS,
    WEIGHT_SUMS,
    find_moving_sides,
    get_reduction,
    sum_by_bin,
)


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
    """Measure rows of one update for the parts in ``sides``; see the stages for the arguments.

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
        counted[f"{name}/{DISTANCE}"] = _count(distance.masked_fill(fixed, math.inf), looked)
        if mask.ratio == "full":
            there = valid if mask.picks_tokens else units.exists
            equal = there if staleness is None else there & _find_fresh(staleness, units, mask.picks_tokens)
            noise, fixed = _compute_distance(mask, sides[name], *_compute_extremes(mask, units, *operands["rollout"]))
            counted[f"{name}/{NOISE}"] = _count(noise, equal & ~fixed)
    return _defer(counted)


def _find_fresh(staleness: Tensor, units: Units, by_token: bool) -> Tensor:
    """Flag, as bool, the units or tokens sampled only by the current weights; (B, 1) if ages are known per row."""
    if staleness.dim() == 1:
        return (staleness == 0)[:, None]
    return staleness == 0 if by_token else units.greatest(staleness) <= 0


def _sum_weights(spec: WeightSpec, log_ratio: Tensor, units: Units) -> dict[str, Tensor]:
    """Sum the weights of some rows by bin, with the lower bound but no cap; also sum for the ESS under the cap.

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


def _count(distance: Tensor, counted: Tensor) -> Tensor:
    return sum_by_bin(EDGES, distance, counted[None])[0]


def _defer(counted: Mapping[str, Tensor]) -> DeferredValue[dict[str, Statistic]]:
    sizes = {name: len(numbers) for name, numbers in counted.items()}

    def decode(numbers: list[float]) -> dict[str, Statistic]:
        found, start = {}, 0
        for name, size in sizes.items():
            found[name], start = Statistic(get_reduction(name), tuple(numbers[start : start + size])), start + size
        return found

    return DeferredValue(torch.cat(list(counted.values())) if counted else torch.zeros(0, dtype=torch.float64), decode)
