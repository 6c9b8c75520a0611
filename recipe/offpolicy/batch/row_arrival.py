"""Rows that a loss saw, matched with the rows that were sent to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class RowArrival(NamedTuple):
    """Counts of rows; see ``match_rows``.

    Attributes:
        sent: rows, each counted once.
        seen: rows, as often as they were seen.
        known: those of the rows seen that were sent.
        whole: the same rows were seen as were sent, and equally often.
    """

    sent: int
    seen: int
    known: int
    whole: bool


def match_rows(sent: Iterable[int], seen: Iterable[int]) -> RowArrival:
    """Match hashes of rows, see ``checksums.hash_rows``; with several epochs each is seen as many times.

    Example:
        >>> match_rows([7, 8], [8, 7, 7, 8])
        RowArrival(sent=2, seen=4, known=4, whole=True)
        >>> match_rows([7, 8], [7, 9])
        RowArrival(sent=2, seen=2, known=1, whole=False)
    """
    sent, seen = [*sent], [*seen]
    times = max(len(seen) // max(len(sent), 1), 1)
    if are_same_rows(sent, seen, times):
        return RowArrival(len(sent), len(seen), len(seen), True)
    once, found = Counter(sent), Counter(seen)
    wanted = Counter({number: times * count for number, count in once.items()})
    return RowArrival(once.total(), found.total(), (wanted & found).total(), False)


def are_same_rows(sent: Sequence[int], seen: Sequence[int], times: int = 1) -> bool:
    """Return True if the rows seen are those that were sent, each ``times`` as often.

    Example:
        >>> are_same_rows([7, 8], [8, 7, 7, 8], times=2)
        True
    """
    # Sorted as numbers: to hash the rows of a large batch one by one takes ten times as long.
    return len(seen) == times * len(sent) and np.array_equal(_sort(seen), _sort(sent).repeat(times))


def _sort(rows: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.sort(np.array(rows, dtype=np.int64))
