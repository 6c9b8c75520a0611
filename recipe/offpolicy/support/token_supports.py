"""Supports of sampled tokens: the ids that could have been sampled, read from vLLM's log-probs.

vLLM's processed log-probs are -inf outside the support. Of the K largest that it returns per token, the finite ones are
the support if one is not finite, or if their probabilities sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MASS = 1e-3
"""Largest deviation from 1 of a complete support's probability mass."""
_LEAST = -1e30
"""Log-probs of at most this value belong to tokens that could not be sampled."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenSupports:
    """Supports of n sampled tokens.

    Attributes:
        sizes: (n,) unsigned integers, number of ids in each token's support; 0 if unknown.
        ids: (sum of sizes,) unsigned integers, the sampled token's id first.
        masses: (n,) float32, sum of mu over the ids that the engine returned.
    """

    sizes: Array
    ids: Array
    masses: Array

    @classmethod
    def empty(cls) -> TokenSupports:
        """Build the supports of zero tokens."""
        return cls(np.zeros(0, np.uint8), np.zeros(0, np.uint8), np.zeros(0, np.float32))

    @property
    def bytes(self) -> int:
        """Bytes of sizes and ids."""
        return int(self.sizes.nbytes + self.ids.nbytes)

    def cut(self, start: int, end: int) -> TokenSupports:
        """Take the tokens from ``start`` to ``end``, exclusive."""
        ends = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        end = min(end, len(self.sizes))
        start = min(start, end)
        return TokenSupports(self.sizes[start:end], self.ids[ends[start] : ends[end]], self.masses[start:end])

    @classmethod
    def concatenate(cls, parts: Sequence[TokenSupports]) -> TokenSupports:
        """Concatenate the supports of several runs of tokens."""
        parts = [cls.empty(), *parts]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("sizes", "ids", "masses")))

    def pad(self) -> npt.NDArray[np.int64]:
        """Return the ids as (n, largest size), padded with -1."""
        sizes = self.sizes.astype(np.int64)
        laid = np.full((len(sizes), int(sizes.max(initial=0))), -1, np.int64)
        laid[np.arange(laid.shape[1]) < sizes[:, None]] = self.ids
        return laid


def read_supports(ids: Sequence[int], log_probs: Sequence[float], count: int) -> TokenSupports:
    """Read the supports of sampled tokens from vLLM's result: for each token itself, then its K most likely ids.

    Args:
        ids, log_probs: values of all tokens, concatenated.
        count: number of sampled tokens.

    Raises:
        ValueError: tokens have different numbers of log-probs.
    """
    if not count:
        return TokenSupports.empty()
    if len(ids) % count or len(ids) != len(log_probs):
        raise ValueError(f"{len(ids)} ids and {len(log_probs)} log-probs do not fit {count} tokens.")
    rows = np.asarray(ids, np.int64).reshape(count, -1)
    found = np.asarray(log_probs, np.float64).reshape(count, -1)
    finite = found > _LEAST
    # If the sampled token is among the most likely ids, it appears twice.
    inside = finite & np.concatenate([np.ones((count, 1), bool), rows[:, 1:] != rows[:, :1]], 1)
    masses = np.where(inside, np.exp(np.where(inside, found, 0.0)), 0.0).sum(1)
    # A support with a known last id is accepted here; the trainer checks its mass.
    known = (~finite).any(1) | (np.abs(masses - 1.0) <= MASS)
    inside &= known[:, None]
    sizes = inside.sum(1)
    return TokenSupports(
        _narrow(sizes, sizes.max(initial=0)), _narrow(rows[inside], rows.max(initial=0)), masses.astype(np.float32)
    )


def _narrow(values: Array, largest: int) -> Array:
    return values.astype(np.min_scalar_type(int(largest)))
