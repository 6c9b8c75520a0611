"""Supports of sampled tokens: the ids that each could have been, as they are read from vLLM's log-probs and travel.

vLLM's processed log-probs are -inf outside the support. Of the K largest that it returns at each token, those that are
finite are the support, if one is not, or if their probabilities sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MASS = 1e-3
"""Distance from 1 at which the probabilities of a support have summed to it."""
_LEAST = -1e30
"""Log-probs from here on are of tokens that could not be sampled."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TokenSupports:
    """Supports of n sampled tokens.

    Attributes:
        sizes: (n,) unsigned integers, ids in each token's support; 0 where it is not known.
        ids: (sum of sizes,) unsigned integers, the sampled token's first.
        masses: (n,) float32, the sum of mu over the ids that the engine returned.
    """

    sizes: Array
    ids: Array
    masses: Array

    @classmethod
    def empty(cls) -> TokenSupports:
        """Build those of no token."""
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
        """Put those of several runs of tokens one behind the other."""
        parts = [cls.empty(), *parts]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("sizes", "ids", "masses")))

    def pad(self) -> npt.NDArray[np.int64]:
        """Lay the ids out: (n, largest size), filled up with -1."""
        sizes = self.sizes.astype(np.int64)
        laid = np.full((len(sizes), int(sizes.max(initial=0))), -1, np.int64)
        laid[np.arange(laid.shape[1]) < sizes[:, None]] = self.ids
        return laid


def read_supports(ids: Sequence[int], log_probs: Sequence[float], count: int) -> TokenSupports:
    """Read the supports of sampled tokens from what vLLM returns of each: the token itself, then its K likeliest.

    Args:
        ids, log_probs: of all tokens, one behind the other.
        count: sampled tokens.

    Raises:
        ValueError: tokens do not have as many log-probs as each other.
    """
    if not count:
        return TokenSupports.empty()
    if len(ids) % count or len(ids) != len(log_probs):
        raise ValueError(f"{len(ids)} ids and {len(log_probs)} log-probs are not those of {count} tokens.")
    rows = np.asarray(ids, np.int64).reshape(count, -1)
    found = np.asarray(log_probs, np.float64).reshape(count, -1)
    finite = found > _LEAST
    # The sampled token stands among the likeliest once more, unless it is not one of them.
    inside = finite & np.concatenate([np.ones((count, 1), bool), rows[:, 1:] != rows[:, :1]], 1)
    masses = np.where(inside, np.exp(np.where(inside, found, 0.0)), 0.0).sum(1)
    # A support of which an id is known to be the last is taken as it is: its mass is judged by the trainer.
    known = (~finite).any(1) | (np.abs(masses - 1.0) <= MASS)
    inside &= known[:, None]
    sizes = inside.sum(1)
    return TokenSupports(
        _narrow(sizes, sizes.max(initial=0)), _narrow(rows[inside], rows.max(initial=0)), masses.astype(np.float32)
    )


def _narrow(values: Array, largest: int) -> Array:
    return values.astype(np.min_scalar_type(int(largest)))
