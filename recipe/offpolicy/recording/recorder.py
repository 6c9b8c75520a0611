"""Writes what the loss saw, in a thread beside the training; it drops rows, and in the end itself, before it waits."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..batch_plan import UpdateRows
from ..voice import logger
from .capture import Packed, unpack
from .files import PARTIAL, SUFFIX, OverLimit, write
from .recording import file_name, step_of
from .rows import Rows, concatenated
from .settings import SECTION, RecordSettings

MOST_TIME = 0.05
"""Share of the time since the first row that recording may take from the training; beyond it, updates are left out."""
GRACE = 1.0
"""Seconds that it may take besides: what is done once, such as the first import, is no part of a step."""
_NICE = 10


@dataclass(frozen=True)
class _Item:
    """Rows for the writer, with what the whole file of their step says; ``last``: the file is complete with them."""

    step: int
    mini_batch: int
    packed: Packed | None
    spec: Mapping[str, Any]
    reasons: tuple[str, ...]
    last: bool


@dataclass
class Counters:
    """What happened since it was last asked.

    Attributes:
        rows: handed to the writer.
        dropped_rows: left out or lost, because something is full, broken or too slow.
        bytes: written.
        seconds: of the training thread.
    """

    rows: int = 0
    dropped_rows: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class _Open:
    """The step whose rows are being collected."""

    step: int
    spec: Mapping[str, Any]
    reasons: tuple[str, ...]
    rows: list[Rows] = field(default_factory=list)
    held: int = 0


class Recorder:
    """Records one rank's rows; ``admit`` and ``put`` are called by the training thread and return at once.

    Args:
        settings: where to and how much.
        rank: data-parallel rank.
        ranks: how many share the directory.
        clock: gives seconds.
    """

    def __init__(
        self, settings: RecordSettings, *, rank: int, ranks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.settings = settings
        self.rank = rank
        self.limit = settings.max_bytes / ranks
        self.stopped: str | None = None
        self._ranks = ranks
        self._clock = clock
        self._directory = Path(settings.dir)
        # Of the training thread alone.
        self._update: tuple[int, int] | None = None
        self._seen = 0
        self._skips = False
        self._since: float | None = None
        self._spent = 0.0
        self._warned = False
        # Shared.
        self._condition = threading.Condition()
        self._items: deque[_Item] = deque()
        self._waiting = 0
        self._counters = Counters()
        self._busy = False
        self._thread: threading.Thread | None = None
        # Of the writer alone.
        self._open: _Open | None = None
        self._written: dict[int, int] | None = None

    def admit(self, step: int, update: UpdateRows, rows: int) -> int | None:
        """Announce a micro-batch of ``rows`` rows; each of an update's is announced, in the order of use.

        Returns:
            Gradient steps of ``step`` before this micro-batch, for ``put``; None where it is not to be recorded: its
            rows were used before in this update, or recording has stopped, or takes too much time.
        """
        now = self._clock()
        if self._since is None:
            self._since = now
        if (step, update.update) != self._update:
            # Between updates, so that no group of rows is torn.
            self._skips = self._update is not None and self._spent > GRACE + MOST_TIME * (now - self._since)
            self._update, self._seen = (step, update.update), 0
            if self._skips and not self._warned:
                self._warned = True
                logger.warning(
                    "%s.every=%d: recording has taken %.2g of the time since the first row, and may take %g. Updates "
                    "are left out of it, training goes on. Raise it, or set %s.share=%.2g.",
                    SECTION,
                    self.settings.every,
                    self._spent / (now - self._since),
                    MOST_TIME,
                    SECTION,
                    self.settings.share / 2,
                )
        before = self._seen
        if before >= update.rows:
            return None
        self._seen += rows
        if self._skips or self.stopped is not None:
            self._drop(rows)
            return None
        return update.gradient_steps + before // update.mini_batch_rows

    def put(
        self,
        step: int,
        update: UpdateRows,
        mini_batch: int,
        packed: Packed,
        spec: Mapping[str, Any],
        reasons: Sequence[str],
    ) -> None:
        """Hand over the rows that ``admit`` has let in."""
        last = update.update + 1 >= update.updates and self._seen >= update.rows
        with self._condition:
            fits = self._waiting + packed.nbytes <= self.settings.max_waiting_bytes
            if fits:
                self._waiting += packed.nbytes
                self._counters.rows += packed.rows
            else:
                self._counters.dropped_rows += packed.rows
            self._items.append(_Item(step, mini_batch, packed if fits else None, spec, tuple(reasons), last))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offpolicy-record", daemon=True)
                self._thread.start()
            self._condition.notify()

    def spent(self, seconds: float) -> None:
        """Time that the training thread has lost to recording."""
        self._spent += seconds
        with self._condition:
            self._counters.seconds += seconds

    def take(self) -> Counters:
        """What happened since the last call."""
        with self._condition:
            counters, self._counters = self._counters, Counters()
        return counters

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all that was put is written, complete steps or not; whether it was in time."""
        with self._condition:
            self._items.append(_FLUSH)
            self._condition.notify()
            if self._thread is None:
                self._items.clear()
                return True
            return self._condition.wait_for(lambda: not self._items and not self._busy, timeout)

    def _drop(self, rows: int) -> None:
        with self._condition:
            self._counters.dropped_rows += rows

    # The writer ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            # On Linux a thread has a niceness of its own: the training goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: bool(self._items))
                item = self._items.popleft()
                self._busy = True
            try:
                self._handle(item)
            except Exception as error:  # whatever it is: training goes on
                self._stop(error)

    def _handle(self, item: _Item) -> None:
        opened = self._open
        if opened is not None and (item is _FLUSH or opened.step != item.step):
            self._close()
        if item is _FLUSH:
            return
        if self._open is None:
            self._open = _Open(item.step, item.spec, item.reasons)
        if item.packed is not None:
            # A file says one correction: where a step's updates are made under several, the first's rows are kept.
            if self.stopped is not None or (item.spec, item.reasons) != (self._open.spec, self._open.reasons):
                self._release(item.packed.nbytes, item.packed.rows)
            else:
                self._open.held += item.packed.nbytes
                self._open.rows.append(unpack(item.packed, step=item.step, rank=self.rank, mini_batch=item.mini_batch))
        if item.last:
            self._close()

    def _close(self) -> None:
        """Write the step that is open."""
        opened, self._open = self._open, None
        assert opened is not None
        rows = sum(len(part) for part in opened.rows)
        try:
            if rows and self.stopped is None:
                self._write(opened)
                rows = 0
        finally:
            self._release(opened.held, rows)

    def _write(self, opened: _Open) -> None:
        if self._written is None:
            self._written = self._prepare()
        used = sum(size for step, size in self._written.items() if step != opened.step)
        path = self._directory / file_name(opened.step, self.rank)
        size = write(path, concatenated(opened.rows), opened.spec, opened.reasons, limit=self.limit - used)
        self._written[opened.step] = size
        with self._condition:
            self._counters.bytes += size

    def _prepare(self) -> dict[int, int]:
        """Step -> bytes of this rank's files that are there, from before the run was resumed."""
        self._directory.mkdir(parents=True, exist_ok=True)
        sizes = {}
        for path in self._directory.iterdir():
            found = step_of(path.with_suffix(SUFFIX).name)
            if found is None or found[1] != self.rank:
                continue
            if path.suffix == PARTIAL:
                path.unlink()  # of a process that was killed while it wrote
            elif path.suffix == SUFFIX:
                sizes[found[0]] = path.stat().st_size
        return sizes

    def _release(self, held: int, dropped: int) -> None:
        with self._condition:
            self._waiting -= held
            self._counters.dropped_rows += dropped

    def _stop(self, error: Exception) -> None:
        self.stopped = self._why(error)
        logger.warning("%s Recording stops, training goes on.", self.stopped)

    def _why(self, error: Exception) -> str:
        settings = self.settings
        if isinstance(error, OverLimit):
            return (
                f"{SECTION}.max_bytes={settings.max_bytes:g}: rank {self.rank} has filled its part of {self.limit:g}. "
                f"Fix: raise it, or record less by {SECTION}.every={10 * settings.every} or "
                f"{SECTION}.share={settings.share / 10:g}."
            )
        if isinstance(error, OSError):
            what = os.strerror(error.errno) if error.errno else str(error).split("\n", 1)[0]
            return f"{SECTION}.dir={settings.dir}: {what}. Fix: free space there, or give another directory."
        return f"{SECTION}.dir={settings.dir}: rank {self.rank} cannot record ({type(error).__name__}: {error})."


_FLUSH = _Item(-1, 0, None, {}, (), False)
_RECORDERS: dict[tuple[str, int], Recorder] = {}


def recorder_of(settings: RecordSettings, *, rank: int, ranks: int) -> Recorder:
    """This process's recorder for the directory: losses are handed over again, the thread stays."""
    key = (settings.dir, rank)
    recorder = _RECORDERS.get(key)
    if recorder is None or recorder.settings != settings:
        if recorder is not None:
            recorder.flush()
        elif not _RECORDERS:
            atexit.register(flush_all)
        recorder = _RECORDERS[key] = Recorder(settings, rank=rank, ranks=ranks)
    return recorder


def flush_all(timeout: float = 30.0) -> None:
    """Write what is held, of every recorder in this process."""
    for recorder in _RECORDERS.values():
        recorder.flush(timeout)
