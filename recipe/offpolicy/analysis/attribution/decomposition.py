"""Decomposition of recorded mismatch with bootstrap intervals, by step and by version of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.shares import RECENT, BackendFloor, Shares, choose_floor, compute_shares, estimate_floor
from ...monitor.mismatch.sums import COLUMNS
from ...recording import Rows
from .row_sums import RoutingSums, compute_row_sums

REPLICATES: Final = 400
LEVEL: Final = 0.9
_N, _LK, _GK, _G, _GG = (COLUMNS.index(name) for name in ("tokens", "total_k3", "gap_k3", "gap", "gap_square"))

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Decomposition:
    """Shares of backend, staleness, routing and drift in the mismatch of a set of rows.

    Attributes:
        tokens: number of tokens.
        variance, kl: shares of the variance of log pi/mu, and of its KL; with a share of routing, of log pi/mu as it
            would be without replay.
        intervals: "variance.drift" and the like -> interval of ``LEVEL`` by resampling rows; of identified shares.
        floor_from: where the backend's share comes from: "own rows", "earlier steps", or "" where not identified.
        together: label of the rollout's share where its two parts are not identified.
        replayed_kl: KL(mu, pi) with replay, nats a token, where ``kl`` is of it without; else None.
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


def decompose(
    sums: Array, earlier: Array | None = None, *, routing: RoutingSums | None = None, seed: int = 0
) -> Decomposition:
    """Decompose the mismatch of rows into shares, with intervals.

    Args:
        sums: (N, *SHAPE), of ``compute_row_sums``.
        earlier: SHAPE, of rows before them, whose fresh tokens stand in where these have none.
        routing: of the same rows; None where log-probs without replay are not known.
    """
    replayed = None
    if routing is not None:
        replayed = compute_shares(sums.sum(0))[1].whole
        sums = routing.replayed
    together = sums.sum(0)
    floor, source = choose_floor(together, earlier)
    of_variance, of_kl = _compute_shares(together, floor, None if routing is None else routing.native.sum(0))
    return Decomposition(
        tokens=int(together[..., _N].sum()),
        variance=of_variance,
        kl=of_kl,
        intervals=_intervals(sums, routing, None if source == "own rows" else floor, seed),
        # Without stale tokens the backend is read off the fresh ones, and needs no floor.
        floor_from=(source or "own rows") if of_variance.backend is not None else "",
        replayed_kl=replayed,
    )


def _compute_shares(sums: Array, floor: BackendFloor | None, native: Array | None) -> tuple[Shares, Shares]:
    """Compute the shares of variance and of KL, with one of routing where ``native`` is there, see ``RoutingSums``."""
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


def decompose_by_step(
    sums: Array, steps: NDArray[np.int64], routing: RoutingSums | None = None
) -> dict[int, Decomposition]:
    """Decompose each step; one without fresh rows takes the backend's floor from ``RECENT`` steps before it.

    Args:
        sums: (N, *SHAPE).
        steps: (N,).
        routing: of the same rows.
    """
    result: dict[int, Decomposition] = {}
    numbers = np.unique(steps)
    for index, step in enumerate(numbers):
        # Never later steps: the share of a step must not depend on what followed.
        before = np.isin(steps, numbers[max(0, index - RECENT) : index])
        earlier = sums[before].sum(0) if before.any() else None
        of_step = None if routing is None else routing.take(steps == step)
        result[int(step)] = decompose(sums[steps == step], earlier, routing=of_step)
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


def _intervals(sums: Array, routing: RoutingSums | None, floor: BackendFloor | None, seed: int) -> dict[str, Interval]:
    """Compute bootstrap percentiles of the shares; the floor is resampled too where it is the rows' own."""
    rng = np.random.default_rng(seed)
    rows = len(sums)
    # A bootstrap draw is a weighted sum of rows: one product with the counts.
    flat = sums.reshape(rows, -1)
    native = None if routing is None else routing.native.reshape(rows, -1)
    drawn: dict[str, list[float]] = {}
    for _ in range(REPLICATES):
        counts = np.bincount(rng.integers(rows, size=rows), minlength=rows).astype(np.float64)
        shares = _compute_shares(counts @ flat, floor, None if native is None else counts @ native)
        for name, part in zip(("variance", "kl"), shares, strict=True):
            for key in ("rollout", "backend", "staleness", "routing", "drift"):
                value = getattr(part, key)
                if value is not None and np.isfinite(value):
                    drawn.setdefault(f"{name}.{key}", []).append(value)
    edge = 50 * (1 - LEVEL)
    return {
        key: (float(np.percentile(values, edge)), float(np.percentile(values, 100 - edge)))
        for key, values in drawn.items()
        if len(values) > REPLICATES / 2  # an interval of few identified draws would be of a selection
    }
