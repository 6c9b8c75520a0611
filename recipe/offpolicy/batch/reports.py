"""Reports that workers send among the metrics of an update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


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
