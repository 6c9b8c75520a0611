"""Mismatch profiles: log pi_old/mu and log pi/pi_old by position, length, probability, turn and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.sums import BINS, EDGES
from ...recording import Rows

Array = NDArray[np.float64]

_SIZES: Final = (1, 4, 16, 64, 256, 1024, 4096)
"""Upper ends of buckets of places and lengths, beyond the first."""
_MOST_CELLS: Final = 1 << 16
"""Combinations of buckets that are counted in a table; more, which long gaps between numbers make, are sorted."""


@dataclass(frozen=True)
class ValidTokens:
    """Valid tokens of rows, with finite log-probs, concatenated: (n,) each.

    Attributes:
        row, place: number of the row, and position in its response, from 0.
        mu, old, pi: log-probs, float64.
        turn: number of the model's turn.
        index: of the token in the rows' own columns.
    """

    row: NDArray[np.int64]
    place: NDArray[np.int64]
    mu: Array
    old: Array
    pi: Array
    turn: NDArray[np.int64]
    index: NDArray[np.int64]

    @cached_property
    def gap(self) -> Array:
        """log pi_old - log mu."""
        return self.old - self.mu

    @cached_property
    def drift(self) -> Array:
        """log pi - log pi_old."""
        return self.pi - self.old

    @cached_property
    def total(self) -> Array:
        """log pi - log mu."""
        return self.pi - self.mu

    @cached_property
    def probability(self) -> NDArray[np.int64]:
        """Index into ``BINS`` of the probability under mu."""
        found = np.zeros(self.mu.shape, dtype=np.int8)
        # np.digitize gives the same in several times as long.
        for edge in EDGES:
            found += self.mu >= edge
        return found.astype(np.int64)

    @cached_property
    def k3(self) -> Array:
        """KL(mu, pi_old) of the token, see ``compute_k3``."""
        return compute_k3(self.gap)

    @cached_property
    def total_k3(self) -> Array:
        """KL(mu, pi) of the token."""
        return compute_k3(self.total)


@dataclass(frozen=True)
class BucketSums:
    """Sums over the tokens of one bucket; they add up over steps.

    Attributes:
        gap, drift: mean of log pi_old - log mu, and of log pi - log pi_old, nats.
        gap_square, drift_square: sums of the squared distance from these means.
        k3: sum of KL(mu, pi_old), nats.
    """

    tokens: int
    gap: float
    gap_square: float
    k3: float
    drift: float
    drift_square: float

    def __add__(self, other: BucketSums) -> BucketSums:
        # Chan et al. 1983: no difference of large sums of squares.
        tokens = self.tokens + other.tokens
        share = other.tokens / tokens
        gap, drift = other.gap - self.gap, other.drift - self.drift
        between = self.tokens * share
        return BucketSums(
            tokens,
            self.gap + share * gap,
            self.gap_square + other.gap_square + between * gap * gap,
            self.k3 + other.k3,
            self.drift + share * drift,
            self.drift_square + other.drift_square + between * drift * drift,
        )


Profiles = Mapping[str, Mapping[int, BucketSums]]
"""Name of a profile -> number of a bucket that holds a token -> its sums."""


@dataclass(frozen=True)
class Bucket:
    """Mismatch of the tokens in one bucket of a profile.

    Attributes:
        name: value or range that the tokens share.
        mean, std: of log pi_old - log mu, nats.
        k3: KL(mu, pi_old), nats a token.
        share: of the sum of k3 over all tokens; NaN where that is 0.
        drift_std: of log pi - log pi_old, nats; NaN where not identified.
    """

    name: str
    tokens: int
    mean: float
    std: float
    k3: float
    share: float
    drift_std: float


def is_valid(rows: Rows, tokens: NDArray[np.int64] | slice = slice(None)) -> NDArray[np.bool_]:
    """Check which response tokens have three finite log-probs, of all tokens or of these."""
    mu, old, pi = rows.rollout_log_prob[tokens], rows.old_log_prob[tokens], rows.log_prob[tokens]
    return rows.response_mask[tokens] & np.isfinite(mu) & np.isfinite(old) & np.isfinite(pi)


def select_valid_tokens(rows: Rows) -> ValidTokens:
    """Select the response tokens whose three log-probs are finite."""
    index = np.flatnonzero(is_valid(rows))
    # Most often all are valid, and a slice takes no copy.
    chosen = index if len(index) < rows.tokens else slice(None)
    return ValidTokens(
        row=rows.row_of_token[chosen],
        place=rows.position[chosen],
        mu=rows.rollout_log_prob[chosen].astype(np.float64),
        old=rows.old_log_prob[chosen].astype(np.float64),
        pi=rows.log_prob[chosen].astype(np.float64),
        turn=rows.turn[chosen].astype(np.int64),
        index=index,
    )


def select_staleness(rows: Rows, tokens: ValidTokens) -> NDArray[np.int64]:
    """Select the age of each valid token of ``rows``, see ``Rows.token_staleness``."""
    ages = rows.token_staleness
    return ages if len(tokens.index) == len(ages) else ages[tokens.index]


def compute_k3(log_ratio: Array) -> Array:
    """Compute exp(x) - 1 - x, with x clamped to +-20 in the exponential (Schulman 2020)."""
    return np.expm1(np.clip(log_ratio, -20.0, 20.0)) - log_ratio


def sum_profiles(rows: Rows, tokens: ValidTokens) -> Profiles:
    """Sum the tokens of each bucket of each profile."""
    sizes = np.searchsorted(_SIZES, np.arange(int(np.diff(rows.offsets).max(initial=0)) + 1))
    # ``take`` is faster than an index.
    keys = {
        "position": sizes[1:].take(tokens.place),
        "length": sizes[rows.length].take(tokens.row),
        "probability": tokens.probability,
        "turn": tokens.turn,
        "staleness": select_staleness(rows, tokens),
    }
    # Tokens are summed once, by what they have in all profiles; each profile then adds up these few cells.
    cell, values = number_cells(keys)
    cells = _sum_tokens(cell, len(next(iter(values.values()))), tokens)
    return {name: _merge_cells(values[name], cells) for name in keys}


def build_profiles(sums: Profiles) -> Mapping[str, list[Bucket]]:
    """Build each profile: its name -> its buckets that hold a token, in order."""
    sizes = _ranges("")
    labels = {"position": sizes, "length": sizes, "probability": BINS}
    return {name: _build_buckets(of_name, labels.get(name), name) for name, of_name in sums.items()}


def clear_drift_std(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets with ``drift_std`` NaN, for rows whose drift is not identified."""
    return [replace(bucket, drift_std=float("nan")) for bucket in buckets]


def _ranges(unit: str) -> list[str]:
    starts = [1, *(edge + 1 for edge in _SIZES)]
    names = [f"{a}-{b}{unit}" if a < b else f"{a}{unit}" for a, b in zip(starts, _SIZES, strict=False)]
    return [*names, f"> {_SIZES[-1]}{unit}"]


def number_cells(
    keys: Mapping[str, NDArray[np.int64]],
) -> tuple[NDArray[np.int64], Mapping[str, NDArray[np.int64]]]:
    """Number the combinations of keys: the number of each token's, and the key of each number by name."""
    least = {name: int(key.min(initial=0)) for name, key in keys.items()}
    shape = [int(key.max(initial=0)) - least[name] + 1 for name, key in keys.items()]
    cell = np.zeros(len(next(iter(keys.values()))), dtype=np.int64)
    for (name, key), size in zip(keys.items(), shape, strict=True):
        if size > 1:  # most often one turn, and one age
            cell *= size
            cell += key
            cell -= least[name]
    cells = np.arange(math.prod(shape)) if math.prod(shape) <= _MOST_CELLS else None
    if cells is None:
        cells, cell = np.unique(cell, return_inverse=True)
    values = np.unravel_index(cells, shape)
    return cell, {name: value + least[name] for name, value in zip(keys, values, strict=True)}


def _sum_tokens(cell: NDArray[np.int64], cells: int, tokens: ValidTokens) -> Mapping[str, Array]:
    """Sum tokens by cell: the columns of ``BucketSums``, (cells,) each."""
    counts = np.bincount(cell, minlength=cells).astype(np.float64)

    def total(of: Array) -> Array:
        return np.bincount(cell, weights=of, minlength=cells).astype(np.float64)

    found = {"tokens": counts, "k3": total(tokens.k3)}
    for name, of in (("gap", tokens.gap), ("drift", tokens.drift)):
        found[name] = total(of) / np.maximum(counts, 1)
        found[f"{name}_square"] = total(np.square(of - found[name].take(cell)))
    return found


def _merge_cells(value: NDArray[np.int64], cells: Mapping[str, Array]) -> dict[int, BucketSums]:
    """Merge the cells of each value, as ``BucketSums`` add up; without the values that no token has."""
    there = cells["tokens"] > 0
    values, place = np.unique(value[there], return_inverse=True)
    cells = {name: column[there] for name, column in cells.items()}

    def total(of: Array) -> Array:
        return np.bincount(place, weights=of, minlength=len(values)).astype(np.float64)

    columns = {"k3": total(cells["k3"])}
    tokens = total(cells["tokens"])
    for name in ("gap", "drift"):
        columns[name] = total(cells["tokens"] * cells[name]) / tokens
        apart = cells[name] - columns[name][place]
        columns[f"{name}_square"] = total(cells[f"{name}_square"] + cells["tokens"] * apart * apart)
    return {
        int(number): BucketSums(int(tokens[at]), **{name: float(column[at]) for name, column in columns.items()})
        for at, number in enumerate(values)
    }


def _build_buckets(sums: Mapping[int, BucketSums], labels: Sequence[str] | None, name: str) -> list[Bucket]:
    whole = sum(each.k3 for each in sums.values())
    unknown = {-1: "unknown"} if name == "staleness" else {}
    return [
        Bucket(
            name=labels[value] if labels is not None else unknown.get(value, str(value)),
            tokens=each.tokens,
            mean=each.gap,
            std=math.sqrt(each.gap_square / each.tokens),
            k3=each.k3 / each.tokens,
            share=each.k3 / whole if whole > 0 else math.nan,
            drift_std=math.sqrt(each.drift_square / each.tokens),
        )
        for value, each in sorted(sums.items())
    ]
