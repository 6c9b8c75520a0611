"""Backend-noise floor of OPSM's delta: log(mu / pi) when both engines have the same weights.

A delta below this floor drops rows because of the engines' rounding, not because of drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .defaults import ROUNDING
from .intervals import ClusteredShare, compute_least_count, compute_quantile_interval, estimate_share
from .parts import BoundedPart
from .scores import RowState, Scores

Floats = NDArray[np.float64]

_LOWER = (0.95, 0.9, 0.8)
"""Quantiles that are suggested if the recording is too short for the requested one."""


class NotIdentifiedError(ValueError):
    """The recording cannot identify a value.

    Attributes:
        key: the value, below ``correction``.
        reason: what is missing and how to get it.
        share: a quantile of the noise that the recording can bound; None if there is none.
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
        share: which quantile that is.
        rows, groups: numbers of rows and prompt groups that it is based on.
        unknown_versions: number of these rows whose weight versions were not recorded; they count as fresh.
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
    """Estimate the floor of a delta from rows that fresh weights sampled, before their batch's first gradient step.

    Every such row counts, whatever the sign of its advantage, because noise does not depend on the sign. If the
    recorded pi_old is the trainer's, a row counts only if pi equals pi_old up to ``ROUNDING``. Under another
    ``proximal``, pi is used as pi_old, so this condition always holds.

    Args:
        share: the quantile of the noise that delta has to exceed.
        confidence: confidence of its one-sided upper bound.

    Raises:
        NotIdentifiedError: there are no such rows, or too few.
    """
    key = f"{part.key}.delta"
    first = state.mini_batch == 0
    # An unknown version, -1, counts as fresh; the result reports how many there are.
    fresh = first & (state.staleness <= 0)
    # NaN (no finite token) never counts as same.
    same = fresh & (state.apart <= ROUNDING)
    if not first.any():
        raise NotIdentifiedError(
            key,
            "no row was recorded at mini_batch 0, where pi is pi_old, so the backend noise is "
            "not identified. Record with offpolicy.record from the first gradient step on.",
        )
    if not fresh.any():
        raise NotIdentifiedError(
            key,
            f"all rows at mini_batch 0 were sampled by older weights (staleness "
            f"{int(state.staleness[first].min())} or more), so the backend noise is not identified. Record steps "
            f"of a synchronous run.",
        )
    if np.isnan(state.apart[fresh]).all():
        raise NotIdentifiedError(
            key,
            "no row at mini_batch 0 has a token with a finite log_prob and old_log_prob: the "
            "backend noise is not identified. Record other steps.",
        )
    if not same.any():
        raise NotIdentifiedError(
            key,
            f"at mini_batch 0 log_prob differs from old_log_prob by "
            f"{float(np.nanmin(state.apart[fresh])):.2g} nats per token or more, so pi = pi_old does not hold and "
            "the backend noise is not identified. Record steps in which it does.",
        )
    rows = scores.select(same[scores.row])
    # OPSM compares log(pi / mu) with -delta, so the noise has the opposite sign.
    noise = np.sort(-rows.low)
    quantile, upper, found = _bounded(-rows.low, noise, rows.group, share, confidence)
    if not math.isfinite(upper):
        lower = (each for each in _LOWER if each < share)
        enough = (each for each in lower if math.isfinite(_bounded(-rows.low, noise, rows.group, each, confidence)[1]))
        # The highest quantile that this recording can bound.
        smaller = next(enough, None)
        advice = "" if smaller is None else f", or pass --floor-quantile {smaller:g} to calibrate"
        raise NotIdentifiedError(
            key,
            f"{len(rows)} rows in {found.groups} prompt groups at pi = pi_old are worth "
            f"{0 if math.isnan(found.effective) else math.floor(found.effective)} independent rows, but a bound of "
            f"the {share:g}-quantile of the noise needs {compute_least_count(share, confidence)}. "
            f"Record more steps{advice}.",
            smaller,
        )
    unknown = int((state.staleness[same] < 0).sum())
    return NoiseFloor(max(upper, 0.0), quantile, share, len(rows), found.groups, unknown)


def _bounded(
    noise: Floats, ordered: Floats, group: NDArray[np.int64], share: float, confidence: float
) -> tuple[float, float, ClusteredShare]:
    """Compute a quantile of the noise, its upper bound (inf if there are too few rows), and the effective counts."""
    quantile = float(ordered[max(math.ceil(share * len(ordered)) - 1, 0)]) if len(ordered) else math.nan
    found = estimate_share(noise <= quantile, group)
    _, upper = compute_quantile_interval(ordered, share, found.effective, confidence, one_sided=True)
    return quantile, upper, found
