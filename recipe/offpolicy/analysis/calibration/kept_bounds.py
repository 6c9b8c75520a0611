"""Bounds that keep a target share, and caps of a weight that reach a target ESS, with intervals over prompt groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...correction import MaskSpec
from ...correction.masks import compute_proposal_limit
from ...correction.ratios import EXP_CLAMP
from .floor import (
    Floats,
    Interval,
    NotIdentifiedError,
    compute_quantile_interval,
    compute_share_interval,
    estimate_share,
    resample_totals,
)
from .parts import BoundedPart
from .scores import Scores

DRAWS = 500
_FURTHEST_WEIGHT = math.log(1e3)
"""Largest radius of a weight worth proposing, in nats, for one token or for a mean over tokens; at a ratio of 1000, the
two policies have nothing in common."""
_COARSE = 0.02
"""Largest relative change when a bound is rounded outward and no unit lies in between."""
_SLACK = 1e-4
"""Fraction of the units that may be kept beyond the target if the bound then needs fewer digits. For fewer than 10,000
units, it rounds down to no unit."""
_PLACES = 48
"""Number of radii at which a kept share is drawn."""
_CAPS = 96
"""Number of caps at which an ESS is computed; the interval is determined from this curve."""
_EXACT = 50  # halvings, which reach the precision of float64
_CLOSE = 0.02
"""Fraction of 1 - target by which the ESS may exceed the target if the cap then needs fewer digits."""

Outcome = Literal["found", "not needed", "not reachable", "not identified"]


@dataclass(frozen=True)
class Threshold:
    """The proposed position of the bound that a calibration moves.

    Attributes:
        values: the configuration's values, e.g. ``{"lower": 0.98, "upper": 1.02}``; empty if no bound was found.
        radius: position of the bound, on the scale on which the part compares values (nats for ratios); NaN if no bound
            was found.
        interval: interval of the radius, at the requested confidence; infinite or NaN if the recording does not bound
            it.
        reached: value that the bound reaches on the recording, measured like the target.
        count, groups: numbers of units and prompt groups on which the bound is based; for a kept share, only those to
            which the part applies.
        note: limitation of the bound, or the reason why no bound was found; empty if there is nothing to note.
        outcome: whether values were found, or why not.
        missing: what the recording lacks, if no bound was found because the floor could not be estimated.
    """

    values: dict[str, float]
    radius: float
    interval: Interval
    reached: float
    count: int
    groups: int
    note: str = ""
    outcome: Outcome = "found"
    missing: NotIdentifiedError | None = None


def build_not_found(
    scores: Scores, note: str, reached: float = math.nan, outcome: Outcome = "not identified"
) -> Threshold:
    """Build a threshold without a bound, with the reason."""
    groups = len(np.unique(scores.group))
    return Threshold({}, math.nan, (math.nan, math.nan), reached, len(scores), groups, note, outcome)


def find_largest_radius(part: BoundedPart) -> float:
    """Return the largest radius worth proposing, on the scale on which the part compares values.

    For a mask, this is the limit that preflight uses, beyond which a bound has no effect.
    """
    spec = part.spec
    if not isinstance(spec, MaskSpec):
        return EXP_CLAMP if spec.level != "token" and spec.aggregate == "product" else _FURTHEST_WEIGHT
    return min(compute_proposal_limit(spec), spec.entry.greatest)


def check_radius(part: BoundedPart, radius: float) -> str:
    """Explain why a bound at ``radius`` is not worth setting; empty if the bound is worth setting."""
    most = find_largest_radius(part)
    if radius < most:
        return ""
    unit = " nats" if part.on_ratio else ""
    return (
        f"not identified: the bound would be {radius:.3g}{unit}, and beyond {most:.3g} no bound affects related "
        "policies. Look for the fault first: python -m recipe.offpolicy.attribute"
    )


def _round(
    part: BoundedPart, radius: float, accept: Callable[[dict[str, float]], bool], *, outward: bool
) -> dict[str, float]:
    """Round the values at ``radius`` outward or inward, to the fewest digits with which they are accepted."""
    exact = part.compute_values_at(radius)
    for digits in range(1, 17):
        scale = 10.0**digits
        values = {}
        for name, value in exact.items():
            whole = math.ceil(value * scale) if (name != "lower") == outward else math.floor(value * scale)
            values[name] = float(f"{whole / scale:.{digits}f}")
        if accept(values):
            return values
    return exact


def compute_kept_share(part: BoundedPart, scores: Scores, limits: tuple[float, float]) -> float:
    """Compute the kept share of the units to which the part applies; NaN if it applies to no unit."""
    if not scores.looked.any():
        return math.nan
    return float(1 - scores.find_outside(limits, exact=part.by_batch).sum() / scores.looked.sum())


def compute_needed_radii(part: BoundedPart, scores: Scores) -> Floats:
    """Compute the smallest radius that keeps each unit to which the part applies: (L,)."""
    return part.compute_radius(scores.low, scores.high)[scores.looked]


def find_bound_for_kept_share(
    part: BoundedPart, scores: Scores, target: float, confidence: float, *, floor: float = -math.inf
) -> Threshold:
    """Find the narrowest bound that keeps at least ``target`` of the units to which the part applies.

    Args:
        floor: lower limit of the radius in nats, such as the size of the backend noise.

    Returns:
        The bound, with no more digits than the recording can distinguish.
    """
    scores = scores.select(scores.looked)
    if not len(scores):
        return build_not_found(scores, f"not identified: it applies to none of the {part.share_of}")
    radii = compute_needed_radii(part, scores)
    ordered = np.sort(radii)
    # This undoes float rounding: 0.07 * 100 is 7.000000000000001, and its ceiling would be 8.
    place = max(math.ceil(target * len(ordered) - 1e-9), 1)
    radius = float(ordered[place - 1])
    # A bound of 0 would reject every unit that has any mismatch.
    if radius == 0 and floor <= 0:
        return build_not_found(scores, "not identified: that share of the units has no mismatch at all")
    notes = []
    # Only a single bound of a ratio may cross 1; the configuration accepts no other radius below 0.
    crosses = part.side != "both" and part.on_ratio and "delta" not in part.now
    least = max(-math.inf if crosses else 0.0, floor)
    if radius < least:
        at = "the backend-noise floor" if least == floor > 0 else "its narrowest possible bound"
        notes.append(f"{at} keeps {float((radii <= least).mean()):.4f}, more than requested")
        radius = least
    if reason := check_radius(part, radius):
        return build_not_found(scores, reason)
    # This is the first unit that the rounded bound must still reject. If there are very many units, a few more may be
    # kept so that the bound needs fewer digits.
    slack = int(_SLACK * len(ordered))
    further = float(ordered[min(int(np.searchsorted(ordered, radius, side="right")) + slack, len(ordered) - 1)])
    furthest = min(further if further > radius else math.inf, radius + _COARSE * abs(radius))

    def accept(values: dict[str, float]) -> bool:
        return all(radius <= reach < furthest for reach in _compute_reaches(part, values))

    # Outward is the safe direction, because a wider bound still meets the target.
    values = _round(part, radius, accept, outward=True)
    found = estimate_share(radii <= radius, scores.group)
    low, high = compute_quantile_interval(ordered, target, found.effective, confidence)
    if math.isinf(high):
        notes.append("too few units to bound it from above")
    elif math.isnan(high):
        notes.append("no interval: all units belong to one prompt")
    interval = (low, high) if math.isnan(low) else (max(low, least), max(high, least))
    reached = compute_kept_share(part, scores, part.compute_limits_with(values))
    return Threshold(values, radius, interval, reached, found.count, found.groups, "; ".join(notes))


def _compute_reaches(part: BoundedPart, values: dict[str, float]) -> list[float]:
    """Compute the radius of each value at the precision that masks use; -inf for a value without a radius."""
    reaches = []
    for name, reach in values.items():
        if name in ("lower", "upper") and part.on_ratio:
            reach = math.log(reach) if reach > 0 else -math.inf if name == "upper" else math.inf
        reach = -reach if name == "lower" else reach
        reaches.append(reach if part.by_batch else float(np.float32(reach)))
    return reaches


@dataclass(frozen=True)
class Curve:
    """Kept share or ESS by radius of the moving bound, (K,) each.

    Attributes:
        radius: radii in ascending order, on the scale on which the part compares values.
        reached: kept share, or ESS.
        low, high: ends of its interval; NaN (unknown) if there is only one prompt.
    """

    radius: Floats
    reached: Floats
    low: Floats
    high: Floats


def choose_radii(part: BoundedPart, scores: Scores) -> Floats:
    """Choose the radii to draw: half by rank, half evenly spaced in log, ascending."""
    radii = compute_needed_radii(part, scores)
    radii = radii[radii > 0]
    if not len(radii):
        return np.zeros(0)
    # Radii spaced by rank resolve the curve near a share of 1; radii spaced evenly in log resolve its fall.
    by_rank = np.quantile(radii, 1 - np.geomspace(1.0, 1 / (2 * len(radii)), _PLACES // 2))
    even = np.geomspace(max(float(np.quantile(radii, 0.02)), 1e-12), float(radii.max()), _PLACES // 2)
    return np.unique(np.concatenate([by_rank, even]))


def compute_kept_curve(part: BoundedPart, scores: Scores, radius: Floats, confidence: float) -> Curve:
    """Compute the kept share of the units that the part applies to, at each ``radius``."""
    radii, scores = compute_needed_radii(part, scores), scores.select(scores.looked)
    found = [estimate_share(radii <= place, scores.group) for place in radius]
    ends = np.array([compute_share_interval(share, confidence) for share in found]).reshape(-1, 2)
    return Curve(radius, np.array([share.share for share in found]), ends[:, 0], ends[:, 1])


def compute_ess(part: BoundedPart, scores: Scores, limits: tuple[float, float]) -> float:
    """Compute (sum w)^2 / (n sum w^2) over tokens, in [0, 1], with bounds at ``limits`` nats; NaN without tokens."""
    if not len(scores):
        return math.nan
    lower, upper = limits
    weight = np.exp(np.clip(scores.low, max(lower, -EXP_CLAMP), min(upper, EXP_CLAMP)))
    if part.rejects:
        weight = np.where((scores.low < lower) | (scores.low > upper), 0.0, weight)
    total, square = float(scores.tokens @ weight), float(scores.tokens @ weight**2)
    return total**2 / (float(scores.tokens.sum()) * square) if square > 0 else 0.0


def find_cap_for_ess(
    part: BoundedPart, scores: Scores, target: float, confidence: float, *, seed: int = 0
) -> Threshold:
    """Find the widest bound of a weight for which the ESS is at least ``target``.

    The ESS of a weight that truncates or clips falls as its cap rises, because the weights become more unequal in the
    Lorenz order. Therefore, exactly one cap meets the target. For a weight that rejects, several bounds may meet the
    target.
    """

    def compute_at(radius: float) -> float:
        return compute_ess(part, scores, part.compute_limits_at(radius))

    # A cap beyond the farthest unit changes nothing.
    widest = float(np.abs(scores.low).max())
    if (most := compute_at(widest)) >= target:
        return build_not_found(scores, f"not needed: without a cap the ESS is {most:.6g}", most, "not needed")
    radius, ess, resampled = resample_ess(part, scores, seed=seed)
    # The ESS of a weight that rejects is not monotonic in its bound, so the search starts from the widest bound of the
    # curve that reaches the target.
    fit = radius[ess >= target] if part.rejects else [0.0] if compute_at(0.0) >= target else []
    if not len(fit):
        best = float(ess.max())
        return build_not_found(scores, f"not reachable: no cap has an ESS above {best:.6g}", best, "not reachable")
    inside, beyond = float(fit[-1]), widest
    for _ in range(_EXACT):
        middle = (inside + beyond) / 2
        inside, beyond = (middle, beyond) if compute_at(middle) >= target else (inside, middle)
    if reason := check_radius(part, inside):
        return build_not_found(scores, reason)

    def accept(values: dict[str, float]) -> bool:
        # Rounding must not move a bound to the other side of ratio 1.
        ordered = values.get("lower", 0.0) <= 1 <= values.get("upper", math.inf) and values.get("lower", 1.0) > 0
        ess = compute_ess(part, scores, part.compute_limits_with(values)) if ordered else math.nan
        return target <= ess < target + _CLOSE * (1 - target)

    # Inward is the safe direction, because a narrower bound has a higher ESS.
    values = _round(part, inside, accept, outward=False)
    reached = compute_ess(part, scores, part.compute_limits_with(values))
    interval = _cross(radius, resampled, target, confidence)
    note = "no interval: all units belong to one prompt" if math.isnan(interval[0]) else ""
    return Threshold(values, inside, interval, reached, len(scores), len(np.unique(scores.group)), note)


def _cross(radius: Floats, resampled: Floats, target: float, confidence: float) -> Interval:
    """Compute percentiles, over the draws, of the widest radius that reaches the target; inf if all radii do."""
    if not len(resampled):
        return math.nan, math.nan
    # The widest radius of each draw is the last True in its row.
    enough = resampled >= target
    end = enough.shape[1] - 1
    last = end - enough[:, ::-1].argmax(1)
    following = np.minimum(last + 1, end)
    draws = np.arange(len(last))
    high, low = resampled[draws, last], resampled[draws, following]
    # Interpolate linearly between the two radii around the crossing.
    step = np.divide(high - target, high - low, out=np.zeros_like(high), where=high > low)
    crossing = radius[last] + step * (radius[following] - radius[last])
    crossing = np.where(enough.any(1), np.where(last == end, math.inf, crossing), radius[0])
    ends = np.quantile(crossing, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    return float(ends[0]), float(ends[1])


def compute_ess_curve(part: BoundedPart, scores: Scores, confidence: float) -> Curve:
    """Compute the ESS by cap, with percentiles of its bootstrap draws."""
    radius, ess, resampled = resample_ess(part, scores)
    low = high = np.full_like(ess, math.nan)
    if len(resampled):
        low, high = np.quantile(resampled, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return Curve(radius, ess, low, high)


def resample_ess(
    part: BoundedPart, scores: Scores, *, seed: int = 0, draws: int = DRAWS
) -> tuple[Floats, Floats, Floats]:
    """Compute the ESS over the caps that occur, for the recording and for resampled prompt groups.

    Returns:
        (K,) log of the cap, or of the lower bound if only the lower bound moves, ascending; (K,) ESS; (draws, K) ESS,
        without draws if there is only one group.
    """
    radius = _choose_caps(np.abs(scores.low))
    groups, group = np.unique(scores.group, return_inverse=True)
    totals = _sum_groups(part, scores, radius, group, len(groups))
    resampled = resample_totals(totals, draws=draws, seed=seed) if len(groups) > 1 else np.empty((0, *totals.shape[1:]))

    def divide(sums: Floats) -> Floats:
        count, total, square = np.moveaxis(sums, -1, 0)
        return np.divide(total**2, count * square, out=np.zeros_like(total), where=square > 0)

    return radius, divide(totals.sum(0)), divide(resampled)


def _sum_groups(part: BoundedPart, scores: Scores, radius: Floats, group: NDArray[np.int64], groups: int) -> Floats:
    """Compute (G, K, 3): tokens, sum of weights and sum of squared weights by group, with the bounds at each radius.

    For each group, a histogram over the radii is accumulated from the smallest radius up. A unit inside the bounds has
    its own weight, and a unit outside has the weight at the bound.
    """
    value = np.clip(scores.low, -EXP_CLAMP, EXP_CLAMP)
    # For each unit, the bound that is nearer to it.
    above = value >= 0 if part.side == "both" else np.full(len(value), part.side == "upper")
    # The index of the first radius that contains the unit; K if no radius does.
    bins = len(radius) + 1
    index = group * bins + np.searchsorted(radius, np.where(above, value, -value), side="left")

    def accumulate(of: Floats) -> tuple[Floats, Floats]:
        """Sum over the units of each group inside each radius, and outside of it: (G, K) each."""
        histogram = np.bincount(index, weights=of, minlength=groups * bins).astype(np.float64).reshape(groups, bins)
        inside = histogram[:, :-1].cumsum(1)
        return inside, histogram.sum(1, keepdims=True) - inside

    tokens, weight = scores.tokens.astype(np.float64), np.exp(value)
    (total, _), (square, _) = accumulate(tokens * weight), accumulate(tokens * weight**2)
    if not part.rejects:
        beyond_above, beyond_below = (accumulate(tokens * side)[1] for side in (above, ~above))
        total = total + beyond_above * np.exp(radius) + beyond_below * np.exp(-radius)
        square = square + beyond_above * np.exp(2 * radius) + beyond_below * np.exp(-2 * radius)
    count = np.bincount(group, weights=tokens, minlength=groups)[:, None].repeat(len(radius), axis=1)
    return np.stack([count, total, square], axis=-1)


def _choose_caps(distance: Floats) -> Floats:
    """Choose radii from 0 to the largest distance, more densely in the tail."""
    # Half of the radii are chosen by rank, from the largest distance inward, because a few units determine the ESS
    # there.
    tail = np.quantile(distance, 1 - np.geomspace(1.0, 1 / max(len(distance), 2), _CAPS // 2))
    spread = np.geomspace(max(float(np.quantile(distance, 0.5)), 1e-9), max(float(distance.max()), 1e-9), _CAPS // 2)
    return np.unique(np.concatenate([[0.0], tail, spread, [distance.max()]]))
