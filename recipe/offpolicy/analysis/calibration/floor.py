"""Backend-noise floor of OPSM's delta, and confidence intervals that allow for dependence within a prompt group.

A delta below this floor drops rows because the engines round differently, not because of drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray

from .parts import BoundedPart
from .scores import RowState, Scores

Interval = tuple[float, float]
Floats = NDArray[np.float64]

ROUNDING = 1e-3
"""Largest mean |log pi - log pi_old| of a row, in nats per token, at which pi and pi_old count as equal."""
_LOWER = (0.95, 0.9, 0.8)
"""Quantiles that are suggested if the recording is too short for the requested one."""


@dataclass(frozen=True)
class ClusteredShare:
    """A share of grouped units, with its effective sample size.

    Attributes:
        share: kept / count.
        count: number of units.
        groups: number of prompt groups to which the units belong.
        effective: number of independent units that would give the same precision, count / design effect (Kish 1965);
            NaN (unknown) if there is only one group.
    """

    share: float
    count: int
    groups: int
    effective: float


def estimate_share(kept: NDArray[np.bool_], group: NDArray[np.int64]) -> ClusteredShare:
    """Estimate the share of ``kept``, with the variance of a ratio of group totals (Cochran 1977, 3.27).

    A design effect below 1 counts as 1, because differences within groups exceed differences between groups only by
    chance.

    Args:
        kept: (U,).
        group: (U,) integers >= 0.
    """
    sizes = np.bincount(group)
    totals = np.bincount(group, weights=kept)[sizes > 0]
    sizes = sizes[sizes > 0]
    count, groups = int(sizes.sum()), len(sizes)
    if not count:
        return ClusteredShare(math.nan, 0, 0, math.nan)
    share = float(totals.sum() / count)
    independent = share * (1 - share) / count
    if groups < 2:
        return ClusteredShare(share, count, groups, math.nan)
    # The linearised ratio estimator is needed because groups differ both in size and in the share that they keep.
    residual = totals - share * sizes
    variance = groups / (groups - 1) * float(residual @ residual) / count**2
    # At a share of 0 or 1, the estimated variance is 0, so the design effect is computed as if units were fully
    # dependent.
    effect = max(variance / independent, 1.0) if independent > 0 else float((sizes.astype(float) ** 2).sum() / count)
    return ClusteredShare(share, count, groups, count / effect)


def compute_share_interval(found: ClusteredShare, confidence: float) -> Interval:
    """Compute Wilson's score interval (1927) at the effective count; NaN if that count is unknown."""
    n = found.effective
    if not n > 0:
        return math.nan, math.nan
    z2 = compute_normal_bound(confidence) ** 2
    middle = (found.share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (found.share * (1 - found.share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def compute_quantile_interval(
    ordered: Floats, share: float, effective: float, confidence: float, *, one_sided: bool = False
) -> Interval:
    """Compute a distribution-free interval of the ``share``-quantile by order statistics (Woodruff 1952).

    Of n units, the number below the quantile is binomial in (n, share). With the effective count as n, this also holds
    for clustered units (Korn and Graubard 1998).

    Args:
        ordered: (U,) ascending.
        effective: see ``ClusteredShare``.
        one_sided: whether to compute only the upper end, at ``confidence``; the lower end is then -inf.

    Returns:
        The two ends; infinite if there are too few units to bound that side, NaN if ``effective`` is NaN.
    """
    n = math.floor(effective) if effective > 0 else 0
    if not n:
        return math.nan, math.nan
    tail = (1 - confidence) if one_sided else (1 - confidence) / 2
    first, below = _cumulative(n, share)
    scale = len(ordered) / n
    # These are the smallest u with P(B >= u) <= tail, and the largest l with P(B < l) <= tail.
    upper = first + int(np.searchsorted(below, 1 - tail)) + 1
    lower = 0 if one_sided else first + int(np.searchsorted(below, tail, side="right"))
    return (
        float(ordered[min(math.floor(lower * scale), len(ordered)) - 1]) if lower >= 1 else -math.inf,
        float(ordered[min(math.ceil(upper * scale), len(ordered)) - 1]) if upper <= n else math.inf,
    )


def compute_least_count(share: float, confidence: float) -> int:
    """Return the smallest number n of independent units that bounds the quantile: share^n <= 1 - confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(share))


def resample_totals(totals: Floats, *, draws: int, seed: int) -> Floats:
    """Sum over groups drawn with replacement; this is the cluster bootstrap (Davison and Hinkley 1997).

    Args:
        totals: (G, ...) with one entry per group.

    Returns:
        (draws, ...).
    """
    groups = len(totals)
    flat = totals.reshape(groups, -1)
    rng = np.random.default_rng(seed)
    sums = np.empty((draws, flat.shape[1]))
    # This limits the (draws, groups) table of counts to 128 MB.
    block = max(1, 2**24 // max(groups, 1))
    for start in range(0, draws, block):
        stop = min(start + block, draws)
        times = rng.multinomial(groups, np.full(groups, 1 / groups), size=stop - start)
        sums[start:stop] = times @ flat
    return sums.reshape(draws, *totals.shape[1:])


def _cumulative(n: int, share: float) -> tuple[int, Floats]:
    """Compute the binomial's distribution function within 12 standard deviations: first k, P(B <= k)."""
    reach = 12 * math.sqrt(n * share * (1 - share)) + 12
    first, last = max(0, math.floor(n * share - reach)), min(n, math.ceil(n * share + reach))
    k = torch.arange(first, last + 1, dtype=torch.float64)
    size = torch.tensor(float(n), dtype=torch.float64)
    # This is computed in logs, because the binomial coefficient overflows float64 from about n = 1030.
    log_mass = torch.lgamma(size + 1) - torch.lgamma(k + 1) - torch.lgamma(size - k + 1)
    log_mass = log_mass + k * math.log(share) + (size - k) * math.log1p(-share)
    return first, log_mass.exp().cumsum(0).clamp(max=1.0).numpy()


def compute_normal_bound(confidence: float) -> float:
    """Return z such that a standard normal lies in [-z, z] with probability ``confidence``."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


class NotIdentifiedError(ValueError):
    """The recording cannot identify a value.

    Attributes:
        key: name of the value, below ``correction``.
        reason: what is missing and how to get it.
        share: the highest order of a quantile of the noise that the recording can bound; None if it cannot bound any.
    """

    def __init__(self, key: str, reason: str, share: float | None = None) -> None:
        self.key, self.reason, self.share = key, reason, share
        super().__init__(f"{key}: {reason}")


@dataclass(frozen=True)
class NoiseFloor:
    """Upper confidence bound of a quantile of the backend noise.

    Attributes:
        delta: the bound, in nats; at least 0.
        quantile: measured quantile of the noise.
        share: the order of the quantile, between 0 and 1.
        rows, groups: numbers of rows and prompt groups from which the bound was computed.
        unknown_versions: number of rows, among these, whose weight versions were not recorded; such rows count as
            fresh.
    """

    delta: float
    quantile: float
    share: float
    rows: int
    groups: int
    unknown_versions: int


def estimate_noise_floor(
    part: BoundedPart, scores: Scores, state: RowState, *, share: float, confidence: float
) -> NoiseFloor:
    """Estimate the floor of a delta from rows sampled by fresh weights, before their batch's first gradient step.

    Every such row counts, regardless of the sign of its advantage, because noise does not depend on this sign. If the
    recorded pi_old is the trainer's, a row counts only if pi equals pi_old up to ``ROUNDING``. Under another
    ``proximal``, pi is used as pi_old, so this condition is always met.

    Args:
        share: the quantile of the noise that delta must exceed.
        confidence: confidence level of the one-sided upper bound.

    Raises:
        NotIdentifiedError: there are no rows that count, or too few.
    """
    key = f"{part.key}.delta"
    first = state.mini_batch == 0
    # An unknown version, -1, counts as fresh; the result reports the number of such rows.
    fresh = first & (state.staleness <= 0)
    # NaN (no finite token) never counts as the same policy.
    same = fresh & (state.apart <= ROUNDING)
    if not same.any():
        raise NotIdentifiedError(key, _describe_missing(state, first, fresh))
    rows = scores.select(same[scores.row])
    # OPSM compares log(pi / mu) with -delta, so the noise has the opposite sign.
    quantile, upper, found = _bound(-rows.low, rows.group, share, confidence)
    if not math.isfinite(upper):
        lower = (each for each in _LOWER if each < share)
        # This is the highest quantile that this recording can bound.
        smaller = next((s for s in lower if math.isfinite(_bound(-rows.low, rows.group, s, confidence)[1])), None)
        advice = "" if smaller is None else f", or pass --floor-quantile {smaller:g} to calibrate"
        raise NotIdentifiedError(
            key,
            f"{len(rows)} rows in {found.groups} prompt groups at pi = pi_old correspond to "
            f"{0 if math.isnan(found.effective) else math.floor(found.effective)} independent rows, but a bound on "
            f"the {share:g}-quantile of the noise needs {compute_least_count(share, confidence)}. "
            f"Record more steps{advice}.",
            smaller,
        )
    unknown = int((state.staleness[same] < 0).sum())
    return NoiseFloor(max(upper, 0.0), quantile, share, len(rows), found.groups, unknown)


def _describe_missing(state: RowState, first: NDArray[np.bool_], fresh: NDArray[np.bool_]) -> str:
    """Explain why no row shows the noise, and how to get such rows."""
    if not first.any():
        why, fix = "no row was recorded at mini_batch 0, where pi is pi_old", "from the first gradient step on"
    elif not fresh.any():
        oldest = int(state.staleness[first].min())
        why = f"all rows of mini-batch 0 were sampled by older weights (staleness {oldest} or more)"
        fix = "in a synchronous run"
    elif np.isnan(state.apart[fresh]).all():
        why, fix = "no row at mini_batch 0 has a token with a finite log_prob and old_log_prob", "of other steps"
    else:
        apart = float(np.nanmin(state.apart[fresh]))
        why = f"at mini_batch 0 log_prob differs from old_log_prob by {apart:.2g} nats per token or more"
        fix = "for which pi = pi_old at mini_batch 0"
    return f"{why}, so the backend noise is not identified. Record rows {fix}."


def _bound(
    noise: Floats, group: NDArray[np.int64], share: float, confidence: float
) -> tuple[float, float, ClusteredShare]:
    """Compute a quantile of the noise, its upper bound (inf if there are too few rows), and the effective counts."""
    ordered = np.sort(noise)
    quantile = float(ordered[max(math.ceil(share * len(ordered)) - 1, 0)]) if len(ordered) else math.nan
    found = estimate_share(noise <= quantile, group)
    _, upper = compute_quantile_interval(ordered, share, found.effective, confidence, one_sided=True)
    return quantile, upper, found
