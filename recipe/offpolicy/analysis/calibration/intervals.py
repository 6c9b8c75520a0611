"""Confidence intervals for rows that are dependent within their prompt group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray

Interval = tuple[float, float]


@dataclass(frozen=True)
class ClusteredShare:
    """A share of units that come in groups, with its effective sample size.

    Attributes:
        share: kept / count.
        count: number of units.
        groups: number of prompt groups that they come from.
        effective: number of independent units of the same precision, count / design effect (Kish 1965); NaN if there
            is only one group, which leaves it unknown.
    """

    share: float
    count: int
    groups: int
    effective: float


def estimate_share(kept: NDArray[np.bool_], group: NDArray[np.int64]) -> ClusteredShare:
    """Estimate the share of ``kept``, with the variance of a ratio of group totals (Cochran 1977, 3.27).

    A design effect below 1 counts as 1, because greater differences within groups than between groups are due to
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
    # This is the linearised ratio estimator, because groups vary in size as well as in the share that they keep.
    residual = totals - share * sizes
    variance = groups / (groups - 1) * float(residual @ residual) / count**2
    # At a share of 0 or 1 the variance is 0; the design effect is then taken from full dependence.
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
    ordered: NDArray[np.float64], share: float, effective: float, confidence: float, *, one_sided: bool = False
) -> Interval:
    """Compute a distribution-free interval of the ``share``-quantile by order statistics (Woodruff 1952).

    The number of n units below the quantile is binomial in (n, share); if n is the effective count, this also holds for
    clustered units (Korn and Graubard 1998).

    Args:
        ordered: (U,) ascending.
        effective: see ``ClusteredShare``.
        one_sided: compute only the upper end, at ``confidence``; the lower end is -inf.

    Returns:
        The two ends; infinite if there are too few units to bound that side, NaN if ``effective`` is NaN.
    """
    n = math.floor(effective) if effective > 0 else 0
    if not n:
        return math.nan, math.nan
    tail = (1 - confidence) if one_sided else (1 - confidence) / 2
    first, below = _cumulative(n, share)
    scale = len(ordered) / n
    # The least u with P(B >= u) <= tail, and the largest l with P(B < l) <= tail.
    upper = first + int(np.searchsorted(below, 1 - tail)) + 1
    lower = 0 if one_sided else first + int(np.searchsorted(below, tail, side="right"))
    return (
        float(ordered[min(math.floor(lower * scale), len(ordered)) - 1]) if lower >= 1 else -math.inf,
        float(ordered[min(math.ceil(upper * scale), len(ordered)) - 1]) if upper <= n else math.inf,
    )


def compute_least_count(share: float, confidence: float) -> int:
    """Compute how many independent units an upper bound of the ``share``-quantile needs: share^n <= 1 - confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(share))


def resample_totals(totals: NDArray[np.float64], *, draws: int, seed: int) -> NDArray[np.float64]:
    """Sum over groups drawn with replacement, the cluster bootstrap (Davison and Hinkley 1997).

    Args:
        totals: (G, ...) one entry per group.

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


def _cumulative(n: int, share: float) -> tuple[int, NDArray[np.float64]]:
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
