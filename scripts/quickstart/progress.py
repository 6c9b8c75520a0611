"""Progress on a terminal or in a log: what is happening now, and never a silent half minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.status import Status

HEARTBEAT = 15.0
"""Seconds after which a log that is not a terminal gets a sign of life."""


class Progress:
    """Prints lines with the time since the start; between them a terminal shows a spinner, a log a heartbeat."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        # A log has no width of its own, and wrapped lines are hard to search.
        self.console = console or Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(file=self.console.file, highlight=False, width=max(self.console.width, 160))
        self._clock = clock
        self._start = clock()
        self._stage = ""
        self._stage_start = self._start
        self._last_line = self._start
        self._status: Status | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._status = self.console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()
            self._status = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def line(self, text: str, style: str = "") -> None:
        """A line that stays."""
        self._last_line = self._clock()
        self.console.print(f"[{self.elapsed:4.0f} s] {text}", style=style or None, markup=False, soft_wrap=True)

    def stage(self, name: str, detail: str = "") -> None:
        """A new stage begins; repeating the same name changes nothing."""
        if name == self._stage:
            return
        self._stage, self._stage_start = name, self._clock()
        self.line(f"{name}{f' ({detail})' if detail else ''}", style="bold")

    def tick(self) -> None:
        """To be called several times a second."""
        waited = self._clock() - self._stage_start
        if self._status:
            self._status.update(f"{self._stage}, {waited:.0f} s")
        elif self._clock() - self._last_line > HEARTBEAT:
            self.line(f"... {self._stage}, {waited:.0f} s")
