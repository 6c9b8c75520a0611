"""Mismatch profiles: log pi_old/mu and log pi/pi_old by position, length, probability, turn and staleness."""

from __future__ import annotations

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


def compute_profiles(rows: Rows, tokens: ValidTokens) -> Mapping[str, list[Bucket]]:
    """Compute each profile: its name -> its buckets that hold a token, in order."""
    edges = np.array(_SIZES)
    age = rows.token_staleness[tokens.index]
    return {
        "position": _buckets(tokens, np.searchsorted(edges, tokens.place + 1), _ranges("")),
        "length": _buckets(tokens, np.searchsorted(edges, rows.length[tokens.row]), _ranges("")),
        "probability": _buckets(tokens, np.digitize(tokens.mu, EDGES), BINS),
        "turn": _buckets(tokens, tokens.turn, None),
        "staleness": _buckets(tokens, age, None, names={-1: "unknown"}),
    }


def clear_drift_std(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets with ``drift_std`` NaN, for rows whose drift is not identified."""
    return [replace(bucket, drift_std=float("nan")) for bucket in buckets]


def _ranges(unit: str) -> list[str]:
    starts = [1, *(edge + 1 for edge in _SIZES)]
    names = [f"{a}-{b}{unit}" if a < b else f"{a}{unit}" for a, b in zip(starts, _SIZES, strict=False)]
    return [*names, f"> {_SIZES[-1]}{unit}"]


def _buckets(
    tokens: ValidTokens, key: NDArray[np.int64], labels: Sequence[str] | None, names: Mapping[int, str] | None = None
) -> list[Bucket]:
    gap, drift = tokens.gap, tokens.drift
    loss = compute_k3(gap)
    whole = loss.sum()
    buckets = []
    for value in np.unique(key):
        here = key == value
        label = labels[int(value)] if labels is not None else (names or {}).get(int(value), str(int(value)))
        buckets.append(
            Bucket(
                name=label,
                tokens=int(here.sum()),
                mean=float(gap[here].mean()),
                std=float(gap[here].std()),
                k3=float(loss[here].mean()),
                share=float(loss[here].sum() / whole) if whole > 0 else float("nan"),
                drift_std=float(drift[here].std()),
            )
        )
    return buckets
