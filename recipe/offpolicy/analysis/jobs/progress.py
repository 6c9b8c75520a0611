"""A progress bar with the remaining time, on a terminal alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def show_progress(results: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """Yield ``results`` and show how many of ``total`` have come, on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(results, what, total=total, console=Console(stderr=True), transient=True)
