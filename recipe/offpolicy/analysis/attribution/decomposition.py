"""Decomposition of recorded mismatch with bootstrap intervals, by step and by version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.shares import RECENT, BackendFloor, Shares, choose_floor, compute_shares, estimate_floor
from ...monitor.mismatch.sums import COLUMNS, compute_sums_by_row
from ...recording import Rows

REPLICATES: Final = 400
CHUNK: Final = 1 << 20
"""Padded tokens of one batch, which bounds memory."""
LEVEL: Final = 0.9
_N, _LK, _GK, _G, _GG = (COLUMNS.index(name) for name in ("tokens", "total_k3", "gap_k3", "gap", "gap_square"))

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Decomposition:
    """Shares of backend, staleness and drift in the mismatch of a set of rows.

    Attributes:
        tokens: number of tokens.
        variance, kl: shares of the variance of log pi/mu, and of its KL.
        intervals: "variance.drift" and the like -> interval of ``LEVEL`` by resampling rows; of identified shares.
        floor_from: where the backend's share comes from: "own rows", "earlier steps", or "" where not identified.
        together: label of the rollout's share where its two parts are not identified.
    """

    tokens: int
    variance: Shares
    kl: Shares
    intervals: Mapping[str, Interval]
    floor_from: str
    together: str = "backend and staleness"


@dataclass(frozen=True)
class VersionMismatch:
    """Mismatch of the tokens of one staleness.

    Attributes:
        staleness: steps between the weights that sampled and those that the step began with; -1: not known.
        mean, std: of log pi_old - log mu, nats.
        k3: KL(mu, pi_old), nats a token.
        backend: part of ``k3`` that fresh tokens of the same probability have; None where not identified.
    """

    staleness: int
    rows: int
    tokens: int
    mean: float
    std: float
    k3: float
    backend: float | None


def compute_row_sums(rows: Rows) -> Array:
    """Compute ``mismatch.sums.compute_sums_by_row`` of recorded rows: (N, *SHAPE)."""
    # Rows are padded to the longest of all, so a chunk holds this many.
    longest = max(int(np.diff(rows.offsets).max(initial=1)), 1)
    at_once = max(CHUNK // longest, 1)
    parts = []
    for start in range(0, max(len(rows), 1), at_once):
        some = rows.take(np.arange(start, min(start + at_once, len(rows))))
        columns = some.padded("rollout_log_prob", "old_log_prob", "log_prob", "token_staleness")
        parts.append(compute_sums_by_row(staleness=columns.pop("token_staleness"), **columns).numpy())
    return np.concatenate(parts)


def decompose(sums: Array, earlier: Array | None = None, *, seed: int = 0) -> Decomposition:
    """Decompose the mismatch of rows into shares, with intervals.

    Args:
        sums: (N, *SHAPE), of ``compute_row_sums``.
        earlier: SHAPE, of rows before them, whose fresh tokens stand in where these have none.
    """
    together = sums.sum(0)
    floor, source = choose_floor(together, earlier)
    of_variance, of_kl = compute_shares(together, floor)
    return Decomposition(
        tokens=int(together[..., _N].sum()),
        variance=of_variance,
        kl=of_kl,
        intervals=_intervals(sums, None if source == "own rows" else floor, seed),
        # Without stale tokens the backend is read off the fresh ones, and needs no floor.
        floor_from=(source or "own rows") if of_variance.backend is not None else "",
    )


def drop_drift(found: Decomposition) -> Decomposition:
    """Mark drift as not identified, for rows of first gradient steps alone: later ones are not seen."""
    return replace(
        found,
        variance=replace(found.variance, drift=None),
        kl=replace(found.kl, drift=None),
        intervals={key: interval for key, interval in found.intervals.items() if not key.endswith(".drift")},
    )


def merge_backend_and_staleness(found: Decomposition) -> Decomposition:
    """Mark backend and staleness as not identified, for stale rows whose versions do not show it."""
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


def decompose_by_step(sums: Array, steps: NDArray[np.int64]) -> dict[int, Decomposition]:
    """Decompose each step; one without fresh rows takes the backend's floor from ``RECENT`` steps before it.

    Args:
        sums: (N, *SHAPE).
        steps: (N,).
    """
    result: dict[int, Decomposition] = {}
    numbers = np.unique(steps)
    for index, step in enumerate(numbers):
        # Never later steps: the share of a step must not depend on what followed.
        before = np.isin(steps, numbers[max(0, index - RECENT) : index])
        result[int(step)] = decompose(sums[steps == step], sums[before].sum(0) if before.any() else None)
    return result


def summarize_by_version(sums: Array, rows: Rows) -> list[VersionMismatch]:
    """Summarise the tokens of each staleness, with the backend's floor from the fresh ones among them.

    Args:
        sums: (N, *SHAPE), of ``compute_row_sums`` of ``rows``.
    """
    floor = estimate_floor(sums.sum(0))
    ages = rows.token_staleness
    unlike = rows.response_mask & (ages != np.repeat(rows.staleness, np.diff(rows.offsets)))
    mixed = np.bincount(rows.row_of_token[unlike], minlength=len(rows)) > 0
    parts = {int(age): sums[~mixed & (rows.staleness == age)] for age in np.unique(rows.staleness[~mixed])}
    others = rows.take(np.flatnonzero(mixed))
    of_others = others.token_staleness
    for age in np.unique(of_others[others.response_mask]):
        found = compute_row_sums(replace(others, response_mask=others.response_mask & (of_others == age)))
        there = found[..., _N].sum((1, 2)) > 0
        parts[int(age)] = np.concatenate([parts.get(int(age), found[:0]), found[there]])
    return [_of_version(age, parts[age], floor) for age in sorted(parts)]


def _of_version(age: int, sums: Array, floor: BackendFloor | None) -> VersionMismatch:
    whole = sums.sum((0, 1, 2))
    count = max(float(whole[_N]), 1.0)
    mean = whole[_G] / count
    bins = sums.sum((0, 1))[:, _N]
    k3 = float(whole[_GK] / count)
    backend = None
    if age == 0:
        backend = k3
    elif age > 0 and floor is not None and floor.covered(bins):
        backend = float((bins * floor.k3).sum() / count)
    return VersionMismatch(
        staleness=age,
        rows=len(sums),
        tokens=int(whole[_N]),
        mean=float(mean),
        std=float(np.sqrt(max(whole[_GG] / count - mean**2, 0.0))),
        k3=k3,
        backend=backend,
    )


def _intervals(sums: Array, floor: BackendFloor | None, seed: int) -> dict[str, Interval]:
    """Compute bootstrap percentiles of the shares; the floor is resampled too where it is the rows' own."""
    rng = np.random.default_rng(seed)
    rows = len(sums)
    # A bootstrap draw is a weighted sum of rows: one product with the counts.
    flat = sums.reshape(rows, -1)
    drawn: dict[str, list[float]] = {}
    for _ in range(REPLICATES):
        counts = np.bincount(rng.integers(rows, size=rows), minlength=rows).astype(np.float64)
        for name, part in zip(("variance", "kl"), compute_shares(counts @ flat, floor), strict=True):
            for key in ("rollout", "backend", "staleness", "drift"):
                value = getattr(part, key)
                if value is not None and np.isfinite(value):
                    drawn.setdefault(f"{name}.{key}", []).append(value)
    edge = 50 * (1 - LEVEL)
    return {
        key: (float(np.percentile(values, edge)), float(np.percentile(values, 100 - edge)))
        for key, values in drawn.items()
        if len(values) > REPLICATES / 2  # an interval of few identified draws would be of a selection
    }
