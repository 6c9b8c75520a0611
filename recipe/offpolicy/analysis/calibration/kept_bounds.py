"""Bounds that keep a target share, by order statistics of a part's units, and the kept share by bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...correction import MaskSpec
from ...correction.mask_spec import compute_proposal_limit
from ...correction.ratios import EXP_CLAMP
from .floor import NotIdentifiedError
from .intervals import ClusteredShare, Interval, compute_quantile_interval, compute_share_interval, estimate_share
from .parts import BoundedPart
from .scores import Scores

_FURTHEST_WEIGHT = math.log(1e3)
"""Nats of a token, or of a mean over tokens; at a ratio of 1000 the two policies have nothing in common."""


def find_largest_radius(part: BoundedPart) -> float:
    """Return the largest radius worth proposing, in the values that the part compares.

    For a mask it is preflight's limit, beyond which a bound is inert.
    """
    spec = part.spec
    if not isinstance(spec, MaskSpec):
        return EXP_CLAMP if spec.level != "token" and spec.aggregate == "product" else _FURTHEST_WEIGHT
    return min(compute_proposal_limit(spec), spec.entry.greatest)


def check_radius(part: BoundedPart, radius: float) -> str:
    """Explain why a bound at ``radius`` is not worth setting; empty if it is."""
    most = find_largest_radius(part)
    if radius < most:
        return ""
    unit = " nats" if part.on_ratio else ""
    return (
        f"not identified: it would take a bound at {radius:.3g}{unit}, and beyond {most:.3g} no bound acts "
        f"on related policies. Look for the fault first: python -m recipe.offpolicy.attribute"
    )


_COARSE = 0.02
"""Largest share of a bound by which it may be rounded outward if no unit lies in between."""
_SLACK = 1e-4
"""Share of the units that may be kept beyond the target for fewer digits; no unit if there are fewer than 10,000."""
_DIGITS = 17  # digits of a float64


Outcome = Literal["found", "not needed", "not reachable", "not identified"]


@dataclass(frozen=True)
class Threshold:
    """A proposed position of a moving bound.

    Attributes:
        values: the configuration's values, e.g. ``{"lower": 0.98, "upper": 1.02}``; empty if none was found.
        radius: its position in the units that the part compares (nats for ratios); NaN if none was found.
        interval: interval of the radius, at the requested confidence; infinite or NaN if the recording does not bound
            it.
        reached: value that the bound reaches on the recording, in the target's own measure.
        count, groups: numbers of units and prompt groups that it is based on; for a kept share, only those that the
            part applies to.
        note: limitation of the bound, or the reason why there is none; empty for none.
        outcome: found, or why there are no values.
        missing: what the recording lacks for a floor, if that is the reason.
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
    return Threshold({}, math.nan, (math.nan, math.nan), reached, len(scores), _groups(scores), note, outcome)


def compute_kept_share(part: BoundedPart, scores: Scores, limits: tuple[float, float]) -> float:
    """Compute the kept share of the units that the part applies to; NaN if it applies to none."""
    if not scores.looked.any():
        return math.nan
    return float(1 - scores.find_outside(limits, exact=part.by_batch).sum() / scores.looked.sum())


def compute_needed_radii(part: BoundedPart, scores: Scores) -> NDArray[np.float64]:
    """Compute the radius that keeps each unit that the part applies to, (L,)."""
    return part.compute_radius(scores.low, scores.high)[scores.looked]


def find_bound_for_kept_share(
    part: BoundedPart, scores: Scores, target: float, confidence: float, *, floor: float = -math.inf
) -> Threshold:
    """Find the narrowest bound that keeps at least ``target`` of the units that the part applies to.

    Args:
        floor: nats below which the radius must not fall, such as the reach of backend noise alone.

    Returns:
        The bound, in as few digits as the recording can distinguish.
    """
    if not len(scores):
        return build_not_found(scores, "no unit: no token has a finite mu and pi_old")
    scores = scores.select(scores.looked)
    if not len(scores):
        return build_not_found(scores, f"not identified: it applies to none of the {part.share_of}")
    radii = compute_needed_radii(part, scores)
    ordered = np.sort(radii)
    # This undoes float rounding: 0.07 * 100 is 7.000000000000001, whose ceiling would be 8.
    place = max(math.ceil(target * len(ordered) - 1e-9), 1)
    radius = float(ordered[place - 1])
    # A bound of 0 would reject every unit that has any mismatch.
    if radius == 0 and floor <= 0:
        return build_not_found(scores, "not identified: that share of the units shows no mismatch at all", math.nan)
    note = ""
    least = max(_least(part), floor)
    if radius < least:
        kept_at_least = float((radii <= least).mean())
        at = "the backend-noise floor" if least == floor > 0 else "its narrowest possible bound"
        note = f"{at} keeps {kept_at_least:.4f}, more than requested"
        radius = least
    if reason := check_radius(part, radius):
        return build_not_found(scores, reason)
    kept = radii <= radius
    # The first unit that rounding must not keep; if there are very many units, a few more may be kept for fewer digits.
    slack = int(_SLACK * len(ordered))
    further = ordered[min(int(np.searchsorted(ordered, radius, side="right")) + slack, len(ordered) - 1)]
    following = float(further) if further > radius else math.inf
    values = _rounded(part, radius, following)
    found = estimate_share(kept, scores.group)
    interval = compute_quantile_interval(ordered, target, found.effective, confidence)
    if math.isinf(interval[1]):
        note = "; ".join(filter(None, (note, "too few units to bound it from above")))
    elif math.isnan(interval[1]):
        note = "; ".join(filter(None, (note, "no interval: all units belong to one prompt")))
    return Threshold(
        values,
        radius,
        (max(interval[0], least), max(interval[1], least)) if not math.isnan(interval[0]) else interval,
        compute_kept_share(part, scores, part.compute_limits_with(values)),
        found.count,
        found.groups,
        note,
    )


def _least(part: BoundedPart) -> float:
    """Return the smallest radius that the configuration accepts; -inf for one bound on a ratio, which may cross 1."""
    one_ratio = part.side != "both" and part.on_ratio and "delta" not in part.now
    return -math.inf if one_ratio else 0.0


def _rounded(part: BoundedPart, radius: float, following: float) -> dict[str, float]:
    """Round the values at ``radius`` outward, before ``following``, to the fewest digits."""
    # Outward is the safe direction: a wider bound keeps the target.
    furthest = min(following, radius + _COARSE * abs(radius))
    for digits in range(1, _DIGITS):
        values = {name: _outward(name, value, digits) for name, value in part.compute_values_at(radius).items()}
        if all(radius <= reach < furthest for reach in _reaches(part, values)):
            return values
    return part.compute_values_at(radius)


def _outward(name: str, value: float, digits: int) -> float:
    scale = 10.0**digits
    scaled = math.floor(value * scale) if name == "lower" else math.ceil(value * scale)
    return float(f"{scaled / scale:.{digits}f}")


def _reaches(part: BoundedPart, values: dict[str, float]) -> list[float]:
    """Compute the radius of each value, in the precision in which masks compare; -inf if it has none."""
    reaches = []
    for name, value in values.items():
        reach = value
        if name in ("lower", "upper") and part.on_ratio:
            reach = math.log(value) if value > 0 else -math.inf if name == "upper" else math.inf
        reach = -reach if name == "lower" else reach
        reaches.append(reach if part.by_batch else float(np.float32(reach)))
    return reaches


def _groups(scores: Scores) -> int:
    return len(np.unique(scores.group))


Floats = NDArray[np.float64]
_PLACES = 48


@dataclass(frozen=True)
class KeptCurve:
    """Kept share by radius of the moving bound, (K,) each.

    Attributes:
        radius: ascending, in the units that the part compares.
        share: kept share.
        low, high: its interval; NaN if there is only one prompt, which leaves it unknown.
        count: number of units that it is based on.
    """

    radius: Floats
    share: Floats
    low: Floats
    high: Floats
    count: int


def choose_radii(part: BoundedPart, scores: Scores) -> Floats:
    """Choose the radii to draw: half by rank, half evenly spaced in log, ascending."""
    radii = compute_needed_radii(part, scores)
    radii = radii[radii > 0]
    if not len(radii):
        return np.zeros(0)
    # Ranks resolve the curve near a share of 1, and even steps in log resolve it where it falls.
    by_rank = np.quantile(radii, 1 - np.geomspace(1.0, 1 / (2 * len(radii)), _PLACES // 2))
    even = np.geomspace(max(float(np.quantile(radii, 0.02)), 1e-12), float(radii.max()), _PLACES // 2)
    return np.unique(np.concatenate([by_rank, even]))


def compute_kept_curve(part: BoundedPart, scores: Scores, radius: Floats, confidence: float) -> KeptCurve:
    """Compute the kept share of the units that the part applies to, at each ``radius``."""
    radii, scores = compute_needed_radii(part, scores), scores.select(scores.looked)
    found: list[ClusteredShare] = [estimate_share(radii <= place, scores.group) for place in radius]
    ends = np.array([compute_share_interval(share, confidence) for share in found]).reshape(-1, 2)
    return KeptCurve(radius, np.array([share.share for share in found]), ends[:, 0], ends[:, 1], len(scores))
