"""Rows that a loss saw, matched with the rows that were sent to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


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
    once, found = Counter(sent), Counter(seen)
    times = max(found.total() // max(once.total(), 1), 1)
    wanted = Counter({number: times * count for number, count in once.items()})
    return RowArrival(once.total(), found.total(), (wanted & found).total(), wanted == found)
