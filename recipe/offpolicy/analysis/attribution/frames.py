"""Frames of an attribution: valid tokens of recorded rows, cells of tokens, and the mismatch profiles over cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...monitor.mismatch.shares import AGES, BINS, COLUMNS, EDGES, SHAPE
from ...recording import Rows
from ...recording.schema import WITHOUT_REPLAY

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ValidTokens:
    """The valid tokens of rows, that is, those with finite log-probs, concatenated: (n,) each.

    Attributes:
        row, place: number of the row, and the token's position in the response, from 0.
        mu, old, pi: log-probs, float64.
        turn: number of the model's turn.
        index: index of the token in the rows' own columns.
    """

    row: NDArray[np.int64]
    place: NDArray[np.int64]
    mu: Array
    old: Array
    pi: Array
    turn: NDArray[np.int64]
    index: NDArray[np.int64]

    def take(self, chosen: NDArray[np.bool_]) -> ValidTokens:
        """Return only these tokens."""
        return ValidTokens(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})

    @cached_property
    def gap(self) -> Array:
        """log pi_old - log mu."""
        return self.old - self.mu

    @cached_property
    def probability(self) -> NDArray[np.int64]:
        """Index into ``BINS`` of the probability under mu."""
        found = np.zeros(self.mu.shape, dtype=np.int8)
        # np.digitize gives the same result but takes several times as long.
        for edge in EDGES:
            found += self.mu >= edge
        return found.astype(np.int64)


def select_valid_tokens(rows: Rows) -> ValidTokens:
    """Select the response tokens whose three log-probs are finite."""
    columns = (rows.rollout_log_prob, rows.old_log_prob, rows.log_prob)
    index = np.flatnonzero(np.logical_and.reduce([rows.response_mask, *map(np.isfinite, columns)]))
    # Usually, all tokens are valid, and a slice avoids a copy.
    chosen = index if len(index) < rows.tokens else slice(None)
    mu, old, pi = (column[chosen].astype(np.float64) for column in columns)
    turn = rows.turn[chosen].astype(np.int64)
    return ValidTokens(rows.row_of_token[chosen], rows.position[chosen], mu, old, pi, turn, index)


def compute_k3(log_ratio: Array) -> Array:
    """Compute exp(x) - 1 - x; inside the exponential, x is clamped to +-20 (Schulman 2020)."""
    return np.expm1(np.clip(log_ratio, -20.0, 20.0)) - log_ratio


def hash_ids(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash each row's ids up to and including each token, (M,) modulo 2^64."""
    # The position is hashed too, so that order matters; one running sum then yields the hashes of all prefixes.
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    words = mix(ids.astype(np.uint64) * np.uint64(1 << 32) + (np.arange(len(ids)) - starts).astype(np.uint64))
    ends = np.cumsum(words, dtype=np.uint64)
    return ends - np.concatenate([np.zeros(1, np.uint64), ends])[starts]


def hash_prompts(rows: Rows) -> NDArray[np.uint64]:
    """Hash the prompt of each row, (N,), or its uid if no prompt was recorded."""
    if not len(rows.prompt_ids):
        return pl.Series(map(str, rows.uid), dtype=pl.String).hash().to_numpy()
    whole = np.append(hash_ids(rows.prompt_ids, rows.prompt_offsets), np.uint64(0))
    return mix(np.where(np.diff(rows.prompt_offsets) > 0, whole[rows.prompt_offsets[1:] - 1], np.uint64(0)))


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014), elementwise, modulo 2^64."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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
        A frame with one row per cell: ``row``, the bucket of each of ``PROFILES``, ``COLUMNS``, ``drift``, which is
        log pi - log pi_old, and the squared distances of gap and drift from their means in the cell; and the k3 of log
        pi/mu of each token, (M,), negative if the token is not valid.
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


def _sum_block(keys: Mapping[str, NDArray[np.int64]], columns: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
    # A table of all combinations is used, because numpy fills it in a third of the time of a group-by.
    least = {name: int(key.min(initial=0)) for name, key in keys.items()}
    shape = [int(key.max(initial=0)) - least[name] + 1 for name, key in keys.items()]
    cell = np.zeros(len(keys["row"]), dtype=np.int64)
    for (name, key), size in zip(keys.items(), shape, strict=True):
        if size > 1:  # usually one turn and one age
            cell *= size
            cell += key
            cell -= least[name]
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


def iterate_bounds(offsets: NDArray[np.int64], size: int = BLOCK) -> Iterator[tuple[int, int]]:
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
    """Count the rows that have a token of each staleness; a row without a valid token is as old as its first token."""
    row = cells["row"].to_numpy()
    ages = cells.select("row", "staleness").unique()["staleness"]
    return Counter([*ages, *rows.staleness[np.bincount(row, minlength=len(rows)) == 0].tolist()])


def place_cells(cells: pl.DataFrame, rows: int) -> Array:
    """Add up cells as ``mismatch.shares.compute_sums_by_row`` adds up the tokens of padded rows: (rows, *SHAPE)."""
    age = cells["staleness"].to_numpy()
    kind = np.where(age < 0, AGES.index("unknown"), age > 0)
    sums = np.zeros((rows, *SHAPE))
    np.add.at(sums, (cells["row"].to_numpy(), kind, cells["probability"].to_numpy()), cells.select(COLUMNS).to_numpy())
    return sums


def compute_row_sums(rows: Rows) -> Array:
    """Compute ``mismatch.shares.compute_sums_by_row`` of recorded rows, without padding them: (N, *SHAPE)."""
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


def build_profiles(cells: pl.DataFrame) -> dict[str, list[Bucket]]:
    """Build each profile from cells by all profiles: name of the profile -> its non-empty buckets, in order."""
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
            drift_std=math.sqrt(each["drift_spread"] / tokens),
        )

    return {
        name: [build(name, each) for each in merge(cells, name).sort(name).iter_rows(named=True)] for name in PROFILES
    }


def clear_drift_std(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets with ``drift_std`` NaN, for rows whose drift is not identified."""
    return [replace(bucket, drift_std=float("nan")) for bucket in buckets]
