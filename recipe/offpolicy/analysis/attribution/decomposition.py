"""Decomposition of recorded mismatch: sums over cells of tokens, shares with bootstrap intervals, and profiles."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from ...monitor.mismatch_shares import (
    AGES,
    BINS,
    COLUMNS,
    SHAPE,
    BackendFloor,
    Shares,
    choose_floor,
    compute_many_shares,
    compute_shares,
    estimate_floor,
)
from ...recording import Rows
from ...recording.schema import WITHOUT_REPLAY
from .recorded_tokens import Array, Integers, compute_k3, select_valid_tokens

PROFILES: Final = ("position", "length", "probability", "turn", "staleness")
BLOCK: Final = 2**16
"""Number of tokens that are summed at a time, so that intermediate results stay in the cache."""
_MOST_CELLS: Final = 1 << 16
"""Largest number of bucket combinations that are counted in a table; if large gaps lead to more combinations, the
tokens are sorted instead."""
SIZES: Final = (1, 4, 16, 64, 256, 1024, 4096)
"""Upper ends of the buckets for positions and lengths; the last bucket has no upper end."""


def sum_cells(rows: Rows) -> tuple[pl.DataFrame, Array]:
    """Sum the valid tokens of each row and combination of buckets.

    Returns:
        A frame with one row per cell and the columns ``row``, the bucket of each of ``PROFILES``, ``COLUMNS``,
        ``drift`` (log pi - log pi_old), and the squared distances of gap and drift from their means in the cell; and
        the k3 of log pi/mu of each token, (M,), which is negative if the token is not valid.
    """
    found, loss = [], np.full(rows.tokens, -1.0)
    sizes = np.searchsorted(SIZES, np.arange(int(np.diff(rows.offsets).max(initial=0)) + 1))
    for start, stop in iterate_bounds(rows.offsets):
        block = rows.between(start, stop)
        tokens = select_valid_tokens(block)
        keys = {
            "row": tokens.row,
            "position": sizes[1:].take(tokens.place),  # faster than an index
            "probability": tokens.probability,
            "turn": tokens.turn,
            "staleness": block.token_staleness[tokens.index],
        }
        gap, drift, total = tokens.gap, tokens.pi - tokens.old, tokens.pi - tokens.mu
        total_k3 = compute_k3(total)
        loss[rows.offsets[start] + tokens.index] = total_k3
        columns = {
            "gap": gap,
            "drift": drift,
            "total": total,
            "gap_k3": compute_k3(gap),
            "total_k3": total_k3,
            "gap_square": gap * gap,
            "total_square": total * total,
            "gap_total": gap * total,
        }
        cells = _sum_block(keys, columns)
        found.append(cells | {"row": cells["row"] + start, "length": sizes[block.length][cells["row"]]})
    return pl.DataFrame({name: np.concatenate([each[name] for each in found]) for name in found[0]}), loss


def _sum_block(keys: Mapping[str, Integers], columns: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
    # A table of all combinations is used, because numpy fills it in a third of the time of a group-by.
    least = {name: int(key.min(initial=0)) for name, key in keys.items()}
    shape = [int(key.max(initial=0)) - least[name] + 1 for name, key in keys.items()]
    cell = np.ravel_multi_index([key - least[name] for name, key in keys.items()], shape)
    cells = np.arange(math.prod(shape)) if math.prod(shape) <= _MOST_CELLS else None
    if cells is None:
        cells, cell = np.unique(cell, return_inverse=True)

    def add(values: Array | None = None) -> Array:
        return np.bincount(cell, weights=values, minlength=len(cells)).astype(np.float64)

    sums = {"tokens": add(), **{name: add(values) for name, values in columns.items()}}
    for name in ("gap", "drift"):
        mean = sums[name] / np.maximum(sums["tokens"], 1)
        sums[f"{name}_spread"] = add(np.square(columns[name] - mean.take(cell)))
    there = np.flatnonzero(sums["tokens"])
    values = np.unravel_index(cells[there], shape)
    placed = {name: value + least[name] for name, value in zip(keys, values, strict=True)}
    return {**placed, **{name: of_cells[there] for name, of_cells in sums.items()}}


def iterate_bounds(offsets: Integers, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of blocks of at most ``size`` tokens or of one row; without rows, yield one empty block."""
    start, rows = 0, len(offsets) - 1
    while start < rows or start == 0:
        stop = int(np.searchsorted(offsets, offsets[start] + size, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        yield start, stop
        start = max(stop, 1)


def merge(frame: pl.DataFrame, *keys: str) -> pl.DataFrame:
    """Merge cells that agree in ``keys``."""

    def spread(name: str) -> pl.Expr:
        # This is the method of Chan et al. 1983, which avoids differences of large sums of squares.
        tokens, total = pl.col("tokens"), pl.col(name)
        between = tokens * (total / tokens - total.sum() / tokens.sum()) ** 2
        return (pl.col(f"{name}_spread") + between).sum().alias(f"{name}_spread")

    sums = pl.col("tokens", "gap", "drift", "gap_square", "gap_k3").sum()
    return frame.group_by(keys, maintain_order=True).agg(sums, spread("gap"), spread("drift"))


def count_by_age(cells: pl.DataFrame, rows: Rows) -> Counter[int]:
    """Count the rows that have a token of each staleness; a row without a valid token has the staleness of its first
    token."""
    row = cells["row"].to_numpy()
    ages = cells.select("row", "staleness").unique()["staleness"]
    return Counter([*ages, *rows.staleness[np.bincount(row, minlength=len(rows)) == 0].tolist()])


def place_cells(cells: pl.DataFrame, rows: int) -> Array:
    """Sum the cells of each row, in the layout of ``mismatch_shares.compute_sums_by_row``: (rows, *SHAPE)."""
    age = cells["staleness"].to_numpy()
    kind = np.where(age < 0, AGES.index("unknown"), age > 0)
    sums = np.zeros((rows, *SHAPE))
    np.add.at(sums, (cells["row"].to_numpy(), kind, cells["probability"].to_numpy()), cells.select(COLUMNS).to_numpy())
    return sums


def compute_row_sums(rows: Rows) -> Array:
    """Compute the sums of ``mismatch_shares.compute_sums_by_row`` from recorded rows, without padding: (N, *SHAPE)."""
    return place_cells(sum_cells(rows)[0], len(rows))


def compute_routing_sums(rows: Rows) -> dict[str, Array]:
    """Compute the sums that separate routing, (N, *SHAPE) each; empty if log-probs without replay are unknown.

    In both results, the whole is log pi/mu + R, as it would be without replay. R = log n - log a is the routing part of
    a token: log pi_old under the trainer's own expert routes minus log pi_old under the replayed routes. ``replayed``
    uses log a as log pi_old, so that the remainder of the whole is R + drift. ``native`` uses log n, so that the
    remainder is the drift alone.
    """
    native = rows.extensions.get(WITHOUT_REPLAY)
    if native is None or not np.isfinite(native[rows.response_mask]).any():
        return {}
    # The value is NaN if log n or log a is unknown, so that the token does not count in either result.
    whole = rows.log_prob + (native - rows.old_log_prob)
    return {
        "replayed": compute_row_sums(replace(rows, log_prob=whole)),
        "native": compute_row_sums(replace(rows, log_prob=whole, old_log_prob=native)),
    }


BOUNDS: Final = tuple(
    round(2**32 * total) for total in itertools.accumulate(math.exp(-1) / math.factorial(k) for k in range(12))
)
"""Scaled distribution function of a Poisson variable: the uniform draws from which the variable is 1, 2, and so on."""


def draw_poisson(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Draw an array of Poisson variables of mean 1; the probability of each value is exact to 2^-32.

    The distribution function is inverted, because numpy's own method supports any mean and takes several times as long.
    """
    uniform = random.integers(0, 2**32, shape, dtype=np.uint32)
    counts = np.zeros(shape, dtype=np.uint8)
    for bound in BOUNDS:
        counts += uniform >= np.uint32(bound)
    return counts.astype(np.float64)


REPLICATES: Final = 400
LEVEL: Final = 0.9
_N = COLUMNS.index("tokens")

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
    """Sum all rows, and each bootstrap draw of them: (1 + REPLICATES, *SHAPE); results of disjoint sets can be added.

    The count of each row in a draw is a Poisson variable of mean 1, independent of other rows (Chamandy et al. 2012),
    so the sum of a draw from each of two sets is a draw from their union.

    Args:
        sums: (N, *SHAPE), from ``compute_row_sums``.
        seed: seed of the draws, which are the same for the same rows in any process.
    """
    counts = draw_poisson(np.random.default_rng(seed), (REPLICATES, len(sums)))
    flat = sums.reshape(len(sums), math.prod(sums.shape[1:]))
    # Ages and bins without tokens have a count of 0, so their products are not computed.
    filled = np.flatnonzero(flat.any(0))
    found = np.zeros((1 + REPLICATES, flat.shape[1]))
    found[0] = flat.sum(0)
    # The multiplication uses torch; see ``jobs.prepare_process``.
    found[1:, filled] = (torch.from_numpy(counts) @ torch.from_numpy(flat[:, filled])).numpy()
    return found.reshape(-1, *sums.shape[1:])


def decompose(found: Mapping[str, Array], earlier: Array | None = None) -> Decomposition:
    """Decompose the mismatch of rows into shares, with intervals.

    Args:
        found: results of ``resample`` for the log-probs as ``recorded``, and for the results of
            ``compute_routing_sums``.
        earlier: SHAPE, sums over earlier rows; their fresh tokens are used if these rows have none.
    """
    split, native = found.get("replayed", found["recorded"]), found.get("native")
    floor, source = choose_floor(split[0], earlier)
    of_variance, of_kl = compute_shares(split[0], floor)
    replayed_kl = None
    if native is not None:
        replayed_kl = compute_shares(found["recorded"][0])[1].whole
        of_variance, of_kl = (
            replace(shares, drift=after.drift, routing=(shares.drift or 0.0) - (after.drift or 0.0))
            for shares, after in zip((of_variance, of_kl), compute_shares(native[0]), strict=True)
        )
    return Decomposition(
        tokens=int(split[0, ..., _N].sum()),
        variance=of_variance,
        kl=of_kl,
        intervals=_compute_intervals(split, native, None if source == "own rows" else floor),
        # Without stale tokens, the backend is measured directly on the fresh tokens and needs no floor.
        floor_from=(source or "own rows") if of_variance.backend is not None else "",
        replayed_kl=replayed_kl,
    )


def _compute_intervals(split: Array, native: Array | None, floor: BackendFloor | None) -> dict[str, Interval]:
    """Compute percentiles of the draws' shares; the floor is resampled too if it was estimated from the same rows."""
    found = compute_many_shares(split[1:], floor)[:2]
    after = (None, None) if native is None else compute_many_shares(native[1:])[:2]
    drawn: dict[str, Array] = {}
    for name, part, without in zip(("variance", "kl"), found, after, strict=True):
        drawn |= {f"{name}.{key}": part[key] for key in ("rollout", "backend", "staleness")}
        if without is not None:
            drawn[f"{name}.routing"] = part["drift"] - without["drift"]
        drawn[f"{name}.drift"] = part["drift"] if without is None else without["drift"]
    edge = 50 * (1 - LEVEL)
    intervals = {}
    for key, values in drawn.items():
        finite = values[np.isfinite(values)]
        # An interval of only a few identified draws would be biased by their selection.
        if len(finite) > REPLICATES / 2:
            low, high = np.percentile(finite, [edge, 100 - edge]).tolist()
            intervals[key] = (low, high)
    return intervals


def drop_shares(found: Decomposition, *names: str) -> Decomposition:
    """Mark these shares as not identified.

    Drift is not identified if only the rows of first gradient steps have a known pi_old. Backend and staleness are not
    identified for stale rows whose versions do not show their staleness.
    """
    unknown: Any = dict.fromkeys(names)
    unnoticed: Any = {"floor_from": "", "together": "backend and unnoticed staleness"} if "backend" in names else {}
    return replace(
        found,
        variance=replace(found.variance, **unknown),
        kl=replace(found.kl, **unknown),
        intervals={key: ends for key, ends in found.intervals.items() if key.partition(".")[2] not in names},
        **unnoticed,
    )


def summarize_by_version(cells: pl.DataFrame, ages: Mapping[int, int], sums: Array) -> list[VersionMismatch]:
    """Summarise the tokens of each staleness; the backend's floor is estimated from the fresh tokens.

    Args:
        cells, ages: fields of ``Part``.
        sums: SHAPE, summed over all rows.
    """
    floor = estimate_floor(sums)

    def summarize(age: int) -> VersionMismatch:
        of_age = cells.filter(staleness=age)
        total = of_age.select(pl.col("tokens", "gap", "gap_square", "gap_k3").sum()).row(0, named=True)
        count = max(total["tokens"], 1.0)
        mean, k3 = total["gap"] / count, total["gap_k3"] / count
        bins = np.bincount(of_age["probability"], of_age["tokens"], minlength=len(BINS)).astype(np.float64)
        backend = k3 if age == 0 else None
        if age > 0 and floor is not None and bool(floor.covered(bins)):
            backend = float((bins * floor.k3).sum() / count)
        std = math.sqrt(max(total["gap_square"] / count - mean**2, 0.0))
        return VersionMismatch(age, ages[age], int(total["tokens"]), mean, std, k3, backend)

    return [summarize(age) for age in sorted(ages)]


@dataclass(frozen=True)
class Bucket:
    """Mismatch of the tokens in one bucket of a profile.

    Attributes:
        name: the value or range that defines the bucket.
        mean, std: mean and standard deviation of log pi_old - log mu, nats.
        k3: KL(mu, pi_old), nats per token.
        share: share of the sum of k3 over all tokens; NaN if that sum is 0.
        drift_std: standard deviation of log pi - log pi_old, nats; NaN if not identified.
    """

    name: str
    tokens: int
    mean: float
    std: float
    k3: float
    share: float
    drift_std: float


def build_profiles(cells: pl.DataFrame, *, drift: bool = True) -> dict[str, list[Bucket]]:
    """Build each profile from cells grouped by all profiles: name of the profile -> its non-empty buckets, in order.

    Args:
        drift: whether drift is identified.
    """
    starts = (1, *(edge + 1 for edge in SIZES))
    sizes = [f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, SIZES, strict=False)] + [f"> {SIZES[-1]}"]
    labels = {"position": sizes, "length": sizes, "probability": BINS}
    whole = cells["gap_k3"].sum()

    def build(name: str, each: Mapping[str, Any]) -> Bucket:
        value, tokens = each[name], each["tokens"]
        unknown = name == "staleness" and value < 0
        return Bucket(
            name=labels[name][value] if name in labels else "unknown" if unknown else str(value),
            tokens=int(tokens),
            mean=each["gap"] / tokens,
            std=math.sqrt(each["gap_spread"] / tokens),
            k3=each["gap_k3"] / tokens,
            share=each["gap_k3"] / whole if whole > 0 else math.nan,
            drift_std=math.sqrt(each["drift_spread"] / tokens) if drift else math.nan,
        )

    return {
        name: [build(name, each) for each in merge(cells, name).sort(name).iter_rows(named=True)] for name in PROFILES
    }
