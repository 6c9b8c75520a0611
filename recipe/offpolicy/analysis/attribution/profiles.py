"""Mismatch profiles: log pi_old/mu and log pi/pi_old by position, length, probability, turn and staleness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.sums import BINS, EDGES
from ...recording import Rows

Array = NDArray[np.float64]

_SIZES: Final = (1, 4, 16, 64, 256, 1024, 4096)
"""Upper ends of buckets of places and lengths, beyond the first."""


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

    @property
    def gap(self) -> Array:
        """log pi_old - log mu."""
        return self.old - self.mu

    @property
    def drift(self) -> Array:
        """log pi - log pi_old."""
        return self.pi - self.old

    @property
    def total(self) -> Array:
        """log pi - log mu."""
        return self.pi - self.mu


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


def select_valid_tokens(rows: Rows) -> ValidTokens:
    """Select the response tokens whose three log-probs are finite."""
    finite = np.isfinite(rows.rollout_log_prob) & np.isfinite(rows.old_log_prob) & np.isfinite(rows.log_prob)
    index = np.flatnonzero(rows.response_mask & finite)
    return ValidTokens(
        row=rows.row_of_token[index],
        place=rows.position[index],
        mu=rows.rollout_log_prob[index].astype(np.float64),
        old=rows.old_log_prob[index].astype(np.float64),
        pi=rows.log_prob[index].astype(np.float64),
        turn=rows.turn[index].astype(np.int64),
        index=index,
    )


def compute_k3(log_ratio: Array) -> Array:
    """Compute exp(x) - 1 - x, with x clamped to +-20 in the exponential (Schulman 2020)."""
    return np.expm1(np.clip(log_ratio, -20.0, 20.0)) - log_ratio


def sum_profiles(rows: Rows, tokens: ValidTokens) -> Profiles:
    """Sum the tokens of each bucket of each profile."""
    edges = np.array(_SIZES)
    age = rows.token_staleness[tokens.index]
    gap, drift = tokens.gap, tokens.drift
    k3 = compute_k3(gap)
    keys = {
        "position": np.searchsorted(edges, tokens.place + 1),
        "length": np.searchsorted(edges, rows.length)[tokens.row],
        "probability": np.digitize(tokens.mu, EDGES),
        "turn": tokens.turn,
        "staleness": age,
    }
    return {name: _sum_buckets(key, gap, drift, k3) for name, key in keys.items()}


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


def _sum_buckets(key: NDArray[np.int64], gap: Array, drift: Array, k3: Array) -> dict[int, BucketSums]:
    values, place, counts = np.unique(key, return_inverse=True, return_counts=True)

    def total(of: Array) -> Array:
        return np.bincount(place, weights=of, minlength=len(values)).astype(np.float64)

    means = {name: total(of) / counts for name, of in (("gap", gap), ("drift", drift))}
    squares = {name: total(np.square(of - means[name][place])) for name, of in (("gap", gap), ("drift", drift))}
    columns = (counts, means["gap"], squares["gap"], total(k3), means["drift"], squares["drift"])
    return {
        int(value): BucketSums(int(count), *map(float, sums))
        for value, count, *sums in zip(values, *columns, strict=True)
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
