"""Reports that workers send among an update's metrics, and a comparison of the rows received with the rows sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


def take_reports(metrics: dict[str, Any], key: str) -> list[Any]:
    """Remove the reports of one update, from every rank, mini-batch and micro-batch, from the workers' metrics."""
    return list(_flatten(metrics.pop(key, [])))


def _flatten(value: Any) -> Iterator[Any]:
    # verl nests lists by rank and mini-batch, except with a single rank.
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def find_difference(
    sent: Mapping[str, int], seen: Iterable[int], left: Mapping[str, str] | None = None, epochs: int = 1
) -> str | None:
    """Compare rows by their hashes, see ``seals.hash_rows``; the loss receives each row once per epoch.

    Args:
        sent: key of each row -> hash of the row.
        seen: hashes that the loss has reported, in any order.
        left: key of each row that the loss must not receive -> the reason.
        epochs: number of times that the loss receives each row.

    Returns:
        The difference in words; None if there is none.

    Example:
        >>> find_difference({"a": 7, "b": 8}, [8, 7, 7, 8], epochs=2)
        >>> find_difference({"a": 7, "b": 8}, [7, 8], {"b": "too old"})
        '1 of 2 rows expected (1 left: too old), 2 seen: 1 had left (b)'
    """
    left, seen = left or {}, [*seen]
    gone = [key for key in sent if key in left]
    wanted = {key: number for key, number in sent.items() if key not in left}
    if are_same_rows([*wanted.values()], seen, epochs):
        return None
    # If several rows have the same hash, the surplus is counted for each of them.
    surplus = Counter(seen)
    surplus.subtract(Counter([*wanted.values()] * epochs))
    known, expected = {*sent.values()}, {*wanted.values()}
    unknown = sum(count for number, count in surplus.items() if number not in known)
    kinds = {
        "missing or changed": [key for key, number in wanted.items() if surplus[number] < 0],
        "too often": [key for key, number in wanted.items() if surplus[number] > 0],
        "had left": [key for key in gone if sent[key] not in expected and surplus[sent[key]] > 0],
    }
    parts = [f"{len(keys)} {what} ({', '.join(keys[:3])})" for what, keys in kinds.items() if keys]
    parts += [f"{unknown} not sent with this content"] * bool(unknown)
    reasons = f" ({len(gone)} left: {'; '.join(sorted({left[key] for key in gone}))})" if gone else ""
    times = f", {epochs} epochs" if epochs > 1 else ""
    return f"{len(wanted)} of {len(sent)} rows expected{reasons}{times}, {len(seen)} seen: {', '.join(parts)}"


def are_same_rows(sent: Sequence[int], seen: Sequence[int], times: int = 1) -> bool:
    """Return True if the loss received exactly the rows that were sent, each ``times`` times.

    Example:
        >>> are_same_rows([7, 8], [8, 7, 7, 8], times=2)
        True
    """
    # The numbers are sorted, because counting them by hash takes ten times as long for a large batch.
    return len(seen) == times * len(sent) and np.array_equal(_sort(seen), _sort(sent).repeat(times))


def _sort(rows: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.sort(np.array(rows, dtype=np.int64))
