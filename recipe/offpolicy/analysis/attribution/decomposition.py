"""Decomposition of recorded mismatch with bootstrap intervals, by step and by version of the weights."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from ...monitor.mismatch.shares import (
    BINS,
    COLUMNS,
    RECENT,
    BackendFloor,
    Shares,
    choose_floor,
    compute_many_shares,
    compute_shares,
    estimate_floor,
)

_UNIFORM: Final = 2**32
"""Number of values of the uniform variable."""


def _compute_bounds() -> list[int]:
    """Compute the scaled, rounded distribution function: uniform values from which a variable is 1, 2, and so on."""
    terms = (math.exp(-1) / math.factorial(k) for k in itertools.count())
    scaled = (round(_UNIFORM * total) for total in itertools.accumulate(terms))
    return list(itertools.takewhile(lambda bound: bound < _UNIFORM, scaled))


BOUNDS: Final = tuple(_compute_bounds())


def draw_poisson(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Draw an array of Poisson variables of mean 1; the probability of each value is exact to 2^-32.

    The distribution function is inverted, because numpy's own method supports any mean and takes several times as long.
    """
    uniform = random.integers(0, _UNIFORM, shape, dtype=np.uint32)
    counts = np.zeros(shape, dtype=np.uint8)
    for bound in BOUNDS:
        counts += uniform >= np.uint32(bound)
    return counts.astype(np.float64)


REPLICATES: Final = 400
LEVEL: Final = 0.9
_N = COLUMNS.index("tokens")

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Decomposition:
    """Shares of backend, staleness, routing and drift in the mismatch of some rows.

    Attributes:
        tokens: number of tokens.
        variance, kl: shares of the variance of log pi/mu, and shares of KL(mu, pi); if routing has a share, all are
            shares of log pi/mu as it would be without replay.
        intervals: for identified shares, key such as "variance.drift" -> interval at ``LEVEL``, computed by resampling
            rows.
        floor_from: source of the backend's share: "own rows", "earlier steps", or "" if it is not identified.
        together: label of the rollout's share if backend and staleness are not identified separately.
        replayed_kl: KL(mu, pi) with replay, in nats per token, if ``kl`` is computed without replay; otherwise None.
    """

    tokens: int
    variance: Shares
    kl: Shares
    intervals: Mapping[str, Interval]
    floor_from: str
    together: str = "backend and staleness"
    replayed_kl: float | None = None


@dataclass(frozen=True)
class VersionMismatch:
    """Mismatch of all tokens with the same staleness.

    Attributes:
        staleness: number of steps from the weights that sampled the tokens to the weights at the start of the step; -1
            if unknown.
        mean, std: mean and standard deviation of log pi_old - log mu, nats.
        k3: KL(mu, pi_old), nats per token.
        backend: part of ``k3`` that also occurs in fresh tokens with the same probability; None if not identified.
    """

    staleness: int
    rows: int
    tokens: int
    mean: float
    std: float
    k3: float
    backend: float | None


def resample(sums: Array, seed: Sequence[int] = (0,)) -> Array:
    """Sum all rows, and each bootstrap draw of them: (1 + REPLICATES, *SHAPE); results of several sets of rows add up.

    The count of each row in a draw is a Poisson variable of mean 1, independent of other rows (Chamandy et al. 2012),
    so the sum of a draw from each of two sets is a draw from their union.

    Args:
        sums: (N, *SHAPE), from ``compute_row_sums``.
        seed: seed of the draws, which are the same for the same rows in any process.
    """
    counts = draw_poisson(np.random.default_rng(seed), (REPLICATES, len(sums)))
    flat = sums.reshape(len(sums), math.prod(sums.shape[1:]))
    # Ages and bins without tokens have a count of 0, so their products need not be computed.
    filled = np.flatnonzero(flat.any(0))
    found = np.zeros((1 + REPLICATES, flat.shape[1]))
    found[0] = flat.sum(0)
    # The multiplication uses torch; see ``jobs.prepare_process``.
    found[1:, filled] = (torch.from_numpy(counts) @ torch.from_numpy(flat[:, filled])).numpy()
    return found.reshape(-1, *sums.shape[1:])


def decompose(found: Mapping[str, Array], earlier: Array | None = None) -> Decomposition:
    """Decompose the mismatch of rows into shares, with intervals.

    Args:
        found: results of ``resample``, for the log-probs as ``recorded`` and for ``compute_routing_sums``.
        earlier: SHAPE, sums over earlier rows; their fresh tokens are used if these rows have none.
    """
    split, native = found.get("replayed", found["recorded"]), found.get("native")
    floor, source = choose_floor(split[0], earlier)
    of_variance, of_kl = _compute_shares(split[0], floor, None if native is None else native[0])
    return Decomposition(
        tokens=int(split[0, ..., _N].sum()),
        variance=of_variance,
        kl=of_kl,
        intervals=_compute_intervals(split, native, None if source == "own rows" else floor),
        # Without stale tokens, the backend is measured directly on the fresh tokens and needs no floor.
        floor_from=(source or "own rows") if of_variance.backend is not None else "",
        replayed_kl=None if native is None else compute_shares(found["recorded"][0])[1].whole,
    )


def _compute_shares(sums: Array, floor: BackendFloor | None, native: Array | None) -> tuple[Shares, Shares]:
    """Compute the shares of variance and of KL; if there are ``native`` sums, they include routing's share."""
    found = compute_shares(sums, floor)
    if native is None:
        return found
    of_variance, of_kl = (
        replace(split, drift=after.drift, routing=_subtract(split.drift, after.drift))
        for split, after in zip(found, compute_shares(native), strict=True)
    )
    return of_variance, of_kl


def _subtract(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def drop_drift(found: Decomposition) -> Decomposition:
    """Mark drift as not identified if only the rows of first gradient steps have a known pi_old."""
    return replace(
        found,
        variance=replace(found.variance, drift=None),
        kl=replace(found.kl, drift=None),
        intervals={key: interval for key, interval in found.intervals.items() if not key.endswith(".drift")},
    )


def merge_backend_and_staleness(found: Decomposition) -> Decomposition:
    """Mark backend and staleness as not identified, for stale rows whose versions do not show their staleness."""
    return replace(
        found,
        variance=replace(found.variance, backend=None, staleness=None),
        kl=replace(found.kl, backend=None, staleness=None),
        intervals={
            key: interval for key, interval in found.intervals.items() if not key.endswith((".backend", ".staleness"))
        },
        floor_from="",
        together="backend and unnoticed staleness",
    )


class StepDecomposer:
    """Decomposes one step after another; a step without fresh rows uses the floor of ``RECENT`` earlier steps."""

    def __init__(self) -> None:
        # Later steps are never used, because the shares of a step must not depend on later steps.
        self._before: deque[Array] = deque(maxlen=RECENT)

    def decompose(self, step: Mapping[str, Array]) -> Decomposition:
        """Decompose the next step."""
        found = decompose(step, np.sum(self._before, axis=0) if self._before else None)
        self._before.append(step["recorded"][0])
        return found


def summarize_by_version(cells: pl.DataFrame, ages: Mapping[int, int], sums: Array) -> list[VersionMismatch]:
    """Summarise the tokens of each staleness; the backend's floor is estimated from the fresh tokens.

    Args:
        cells, ages: fields of ``Part``.
        sums: SHAPE, summed over all rows.
    """
    floor = estimate_floor(sums)
    return [_of_version(age, ages[age], cells.filter(staleness=age), floor) for age in sorted(ages)]


def _of_version(age: int, rows: int, cells: pl.DataFrame, floor: BackendFloor | None) -> VersionMismatch:
    found = cells.select(pl.col("tokens", "gap", "gap_square", "gap_k3").sum()).row(0, named=True)
    count = max(found["tokens"], 1.0)
    mean, k3 = found["gap"] / count, found["gap_k3"] / count
    bins = np.bincount(cells["probability"], cells["tokens"], minlength=len(BINS)).astype(np.float64)
    backend = None
    if age == 0:
        backend = k3
    elif age > 0 and floor is not None and bool(floor.covered(bins)):
        backend = float((bins * floor.k3).sum() / count)
    return VersionMismatch(
        staleness=age,
        rows=rows,
        tokens=int(found["tokens"]),
        mean=mean,
        std=math.sqrt(max(found["gap_square"] / count - mean**2, 0.0)),
        k3=k3,
        backend=backend,
    )


def _compute_intervals(split: Array, native: Array | None, floor: BackendFloor | None) -> dict[str, Interval]:
    """Compute percentiles of the draws' shares; the floor is resampled too if it was estimated from the same rows."""
    found = compute_many_shares(split[1:], floor)
    after = (None, None) if native is None else compute_many_shares(native[1:])
    drawn: dict[str, Array] = {}
    for name, part, without in zip(("variance", "kl"), found, after, strict=True):
        drawn |= {f"{name}.{key}": getattr(part, key) for key in ("rollout", "backend", "staleness")}
        if without is not None:
            drawn[f"{name}.routing"] = part.drift - without.drift
        drawn[f"{name}.drift"] = part.drift if without is None else without.drift
    finite = {key: values[np.isfinite(values)] for key, values in drawn.items()}
    edge = 50 * (1 - LEVEL)
    ends = {
        key: np.percentile(values, [edge, 100 - edge]).tolist()
        for key, values in finite.items()
        if len(values) > REPLICATES / 2  # an interval of only a few identified draws would be biased by their selection
    }
    return {key: (low, high) for key, (low, high) in ends.items()}
