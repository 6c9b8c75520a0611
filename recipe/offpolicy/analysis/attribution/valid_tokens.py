"""Valid tokens of recorded rows: log-probs, places, and hashes of the ids up to each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...monitor.mismatch.sums import EDGES
from ...recording import Rows

Array = NDArray[np.float64]


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
    def probability(self) -> NDArray[np.int64]:
        """Index into ``BINS`` of the probability under mu."""
        found = np.zeros(self.mu.shape, dtype=np.int8)
        # np.digitize gives the same in several times as long.
        for edge in EDGES:
            found += self.mu >= edge
        return found.astype(np.int64)


def select_valid_tokens(rows: Rows) -> ValidTokens:
    """Select the response tokens whose three log-probs are finite."""
    columns = (rows.rollout_log_prob, rows.old_log_prob, rows.log_prob)
    index = np.flatnonzero(np.logical_and.reduce([rows.response_mask, *map(np.isfinite, columns)]))
    # Most often all are valid, and a slice takes no copy.
    chosen = index if len(index) < rows.tokens else slice(None)
    mu, old, pi = (column[chosen].astype(np.float64) for column in columns)
    turn = rows.turn[chosen].astype(np.int64)
    return ValidTokens(rows.row_of_token[chosen], rows.position[chosen], mu, old, pi, turn, index)


def compute_k3(log_ratio: Array) -> Array:
    """Compute exp(x) - 1 - x, with x clamped to +-20 in the exponential (Schulman 2020)."""
    return np.expm1(np.clip(log_ratio, -20.0, 20.0)) - log_ratio


def hash_ids(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash the ids of each row up to and with each one, (M,) modulo 2^64."""
    # The position is hashed too, so that order counts; a running sum then gives every prefix in one pass.
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    words = mix(ids.astype(np.uint64) * np.uint64(1 << 32) + (np.arange(len(ids)) - starts).astype(np.uint64))
    ends = np.cumsum(words, dtype=np.uint64)
    return ends - np.concatenate([np.zeros(1, np.uint64), ends])[starts]


def hash_prompts(rows: Rows) -> NDArray[np.uint64]:
    """Hash the prompt of each row, (N,); its uid where no prompt was recorded."""
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
