"""Caps of a weight that reach a target effective sample size, with intervals from resampled prompt groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...correction.ratios import EXP_CLAMP
from .intervals import Interval, resample_totals
from .kept_bounds import Threshold, build_not_found, check_radius
from .parts import BoundedPart
from .scores import Scores

Floats = NDArray[np.float64]

DRAWS = 500
_PLACES = 96
"""Number of caps at which the curve is computed; the interval is read from it."""
_EXACT = 50  # halvings, which reach the precision of float64
_CLOSE = 0.02
"""Share of 1 - target by which the ESS may exceed the target so that the cap needs fewer digits."""


@dataclass(frozen=True)
class EssCurve:
    """ESS by cap, with bootstrap draws.

    Attributes:
        radius: (K,) ascending, log of the cap, or of the lower bound if only the lower bound moves.
        ess: (K,) ESS of the recording.
        resampled: (draws, K) ESS of resampled prompt groups; no draws if there is only one group.
    """

    radius: Floats
    ess: Floats
    resampled: Floats

    def compute_band(self, confidence: float) -> tuple[Floats, Floats]:
        """Compute the percentiles of the bootstrap draws, (K,) each; NaN if there are no draws."""
        if not len(self.resampled):
            return np.full_like(self.ess, math.nan), np.full_like(self.ess, math.nan)
        low, high = np.quantile(self.resampled, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
        return low, high


def compute_ess(part: BoundedPart, scores: Scores, limits: tuple[float, float]) -> float:
    """Compute (sum w)^2 / (n sum w^2) over tokens, with bounds at ``limits`` in nats; in [0, 1], NaN without tokens."""
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
    """Find the widest bound of a weight that leaves an ESS of at least ``target``.

    The ESS of a weight that truncates or clips falls as its cap rises, because its weights grow more unequal in the
    Lorenz order, so exactly one cap meets the target. For a weight that rejects, several bounds may meet it.
    """
    if not len(scores):
        return build_not_found(scores, "no unit: no token has a finite mu and pi_old")
    # A cap beyond the farthest unit changes nothing.
    widest = float(np.abs(scores.low).max())
    if (most := compute_ess(part, scores, part.compute_limits_at(widest))) >= target:
        return build_not_found(scores, f"not needed: without a cap the ESS is {most:.6g}", most, "not needed")
    curve = compute_ess_curve(part, scores, seed=seed)
    if part.rejects:
        # The ESS of a weight that rejects is not monotonic in its bound: start from the widest bound that fits.
        fit = np.nonzero(curve.ess >= target)[0]
        start = float(curve.radius[fit[-1]]) if len(fit) else math.nan
    else:
        start = 0.0 if compute_ess(part, scores, part.compute_limits_at(0.0)) >= target else math.nan
    if math.isnan(start):
        best = float(curve.ess.max())
        return build_not_found(scores, f"not reachable: no cap has an ESS above {best:.6g}", best, "not reachable")
    inside, beyond = start, widest
    for _ in range(_EXACT):
        middle = (inside + beyond) / 2
        inside, beyond = (
            (middle, beyond)
            if compute_ess(part, scores, part.compute_limits_at(middle)) >= target
            else (inside, middle)
        )
    if reason := check_radius(part, inside):
        return build_not_found(scores, reason)
    values = _rounded(part, scores, inside, target)
    reached = compute_ess(part, scores, part.compute_limits_with(values))
    interval = _interval(curve, target, confidence)
    note = "no interval: all units belong to one prompt" if math.isnan(interval[0]) else ""
    return Threshold(values, inside, interval, reached, len(scores), len(np.unique(scores.group)), note)


def compute_ess_curve(part: BoundedPart, scores: Scores, *, seed: int = 0, draws: int = DRAWS) -> EssCurve:
    """Compute the ESS by cap, over the caps that occur."""
    radius = _places(np.abs(scores.low))
    groups, group = np.unique(scores.group, return_inverse=True)
    totals = _group_totals(part, scores, radius, group, len(groups))
    resampled = resample_totals(totals, draws=draws, seed=seed) if len(groups) > 1 else np.empty((0, *totals.shape[1:]))
    return EssCurve(radius, _ess(totals.sum(0)), _ess(resampled))


def _group_totals(part: BoundedPart, scores: Scores, radius: Floats, group: NDArray[np.int64], groups: int) -> Floats:
    """Compute (G, K, 3): tokens, and sums of weights and of their squares, by group, with the bounds at each radius.

    This takes one histogram per group over the radii, accumulated from below: a unit inside the bounds has its own
    weight, and a unit outside has the weight at the bound.
    """
    value = np.clip(scores.low, -EXP_CLAMP, EXP_CLAMP)
    places = len(radius)
    # For each unit, the nearer bound.
    above = value >= 0 if part.side == "both" else np.full(len(value), part.side == "upper")
    # The index of the first radius that contains the unit; K if none does.
    first = np.searchsorted(radius, np.where(above, value, -value), side="left")
    weight = np.exp(value)

    def summed(of: Floats) -> Floats:
        index = group * (places + 1) + first
        counted = np.bincount(index, weights=of, minlength=groups * (places + 1)).astype(np.float64)
        return counted.reshape(groups, places + 1)

    def inside(of: Floats) -> Floats:
        return summed(of)[:, :places].cumsum(1)

    def outside(of: Floats) -> Floats:
        counts = summed(of)
        return counts.sum(1, keepdims=True) - counts[:, :places].cumsum(1)

    tokens = scores.tokens.astype(np.float64)
    total = inside(tokens * weight)
    square = inside(tokens * weight**2)
    if not part.rejects:
        beyond_above, beyond_below = outside(tokens * above), outside(tokens * ~above)
        total = total + beyond_above * np.exp(radius) + beyond_below * np.exp(-radius)
        square = square + beyond_above * np.exp(2 * radius) + beyond_below * np.exp(-2 * radius)
    count = np.bincount(group, weights=tokens, minlength=groups)[:, None].repeat(places, axis=1)
    return np.stack([count, total, square], axis=-1)


def _ess(totals: Floats) -> Floats:
    """Compute the ESS from totals of ``_group_totals``, summed over groups."""
    count, total, square = np.moveaxis(totals, -1, 0)
    return np.divide(total**2, count * square, out=np.zeros_like(total), where=square > 0)


def _places(distance: Floats) -> Floats:
    """Choose radii from 0 to the largest distance, dense in the tail."""
    # Half of the radii go by rank from the largest distance inward, where few units decide the ESS.
    tail = np.quantile(distance, 1 - np.geomspace(1.0, 1 / max(len(distance), 2), _PLACES // 2))
    spread = np.geomspace(max(float(np.quantile(distance, 0.5)), 1e-9), max(float(distance.max()), 1e-9), _PLACES // 2)
    return np.unique(np.concatenate([[0.0], tail, spread, [distance.max()]]))


def _interval(curve: EssCurve, target: float, confidence: float) -> Interval:
    """Compute percentiles over the draws of the widest radius that reaches the target; inf if all radii reach it."""
    if not len(curve.resampled):
        return math.nan, math.nan
    # The widest radius of each draw: the last True of its row.
    enough = curve.resampled >= target
    last = enough.shape[1] - 1 - enough[:, ::-1].argmax(1)
    found = enough.any(1)
    following = np.minimum(last + 1, enough.shape[1] - 1)
    draws = np.arange(len(last))
    high, low = curve.resampled[draws, last], curve.resampled[draws, following]
    # Interpolate linearly between the two radii around the crossing.
    step = np.divide(high - target, high - low, out=np.zeros_like(high), where=high > low)
    crossing = curve.radius[last] + step * (curve.radius[following] - curve.radius[last])
    crossing = np.where(last == enough.shape[1] - 1, math.inf, np.where(found, crossing, curve.radius[0]))
    crossing = np.where(found, crossing, curve.radius[0])
    ends = np.quantile(crossing, [(1 - confidence) / 2, (1 + confidence) / 2], method="inverted_cdf")
    return float(ends[0]), float(ends[1])


def _rounded(part: BoundedPart, scores: Scores, radius: float, target: float) -> dict[str, float]:
    """Round the values at ``radius`` inward, to the fewest digits that stay close to the target."""
    for digits in range(1, 17):
        scale = 10.0**digits
        values = {}
        for name, value in part.compute_values_at(radius).items():
            # Inward is the safe direction: a narrower bound has a higher ESS.
            inward = math.ceil(value * scale) if name == "lower" else math.floor(value * scale)
            values[name] = float(f"{inward / scale:.{digits}f}")
        # Rounding must not move a bound to the other side of ratio 1.
        ordered = values.get("lower", 0.0) <= 1 <= values.get("upper", math.inf) and values.get("lower", 1.0) > 0
        ess = compute_ess(part, scores, part.compute_limits_with(values)) if ordered else math.nan
        if target <= ess < target + _CLOSE * (1 - target):
            return values
    return part.compute_values_at(radius)
