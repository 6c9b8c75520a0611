"""Asynchronous recorder that never blocks training; it drops rows instead, and stops after an error."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..batch.plan import UpdateRows
from .files import OverLimit
from .run import SECTION, RecordSettings
from .writer import Item, Outcome, Packed, StepWriter

MOST_TIME = 0.05
"""Time that recording may take from the training thread in one step, as a share of the last step's duration."""
FIRST = 1.0
"""Seconds that recording may take in the first step, when no duration is known yet."""
_ROUNDING = 1e-9


class TimeBudget:
    """Admits micro-batches as long as the measured cost of earlier micro-batches fits the step's budget.

    The cost of a micro-batch is known only after it has been recorded. Within a step, the estimate is therefore the
    seconds per row of the latest micro-batch. Across steps, the estimate is the smaller of the latest two values, so
    that one slow moment does not stop recording. If an update does not fit completely, the admitted micro-batches are
    spread evenly over it, because the rows of later mini-batches are staler.

    Attributes:
        allowed: seconds that recording may take in the current step.
        taken: seconds that recording has taken in the current step so far.
    """

    def __init__(self) -> None:
        self.allowed = FIRST
        self.taken = 0.0
        self._step: int | None = None
        self._began = 0.0
        self._costs: deque[float] = deque(maxlen=2)
        self._cost = 0.0
        self._share = 1.0
        self._credit = 0.0
        self._open = 0

    def begin(self, step: int, now: float, *, rows: int, updates: int) -> None:
        """Begin an update.

        Args:
            step: number of the step, from 1; some steps may have no update.
            now: seconds.
            rows: number of rows of this update.
            updates: number of remaining updates of this step, including this one.
        """
        if step != self._step:
            if self._step is not None and step > self._step:
                self.allowed = MOST_TIME * (now - self._began) / (step - self._step)
            self._step, self._began, self.taken = step, now, 0.0
            # A cost that was measured only once may include the overhead of a first call, so the cost is measured
            # again.
            self._cost = min(self._costs) if len(self._costs) == 2 else 0.0
        left, needed = (self.allowed - self.taken) / max(updates, 1), self._cost * rows
        self._share = min(1.0, max(left, 0.0) / needed) if needed > 0 else 1.0

    def admits(self, rows: int) -> bool:
        """Return True if a micro-batch of ``rows`` rows fits the budget and must be recorded."""
        self._open = 0
        self._credit += self._share * rows
        if self._credit < rows * (1 - _ROUNDING):
            return False
        if self.taken + self._cost * rows > self.allowed * (1 + _ROUNDING):
            self._credit = float(rows)
            return False
        self._credit -= rows
        self._open = rows
        return True

    def spent(self, seconds: float) -> None:
        """Add the time that the training thread has spent on the last admitted or rejected micro-batch."""
        self.taken += seconds
        if self._open:
            self._cost = seconds / self._open
            self._costs.append(self._cost)
            self._open = 0


logger = logging.getLogger("verl.offpolicy")

_NICE = 10


@dataclass
class Counters:
    """Counts of recorded and dropped rows since the last ``take``.

    Attributes:
        rows: rows given to the writer.
        dropped_rows: rows skipped or lost, because a queue or disk is full, broken or too slow.
        bytes: bytes written.
        seconds: time spent by the training thread.
    """

    rows: int = 0
    dropped_rows: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Recorder:
    """Records one rank's rows; the training thread calls ``admit`` and ``put``, which return at once.

    Args:
        settings: settings of the recording.
        rank: data-parallel rank.
        ranks: number of ranks that share the directory.
        clock: returns seconds.

    Attributes:
        settings, clock: as given.
        stopped: why recording has stopped, and the fix; None while recording is active.
    """

    def __init__(
        self, settings: RecordSettings, *, rank: int, ranks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.settings = settings
        self.stopped: str | None = None
        self.clock = clock
        self._writer = StepWriter(settings, rank=rank, ranks=ranks)  # used only by the writer's thread
        # Used only by the training thread.
        self._update: tuple[int, int] | None = None
        self._seen = 0
        self._holds = False
        self._budget = TimeBudget()
        self._warned = False
        # Shared by both threads.
        self._condition = threading.Condition()
        self._items: deque[Item | None] = deque()  # None: write the open update
        self._waiting = 0
        self._counters = Counters()
        self._busy = False
        self._thread: threading.Thread | None = None

    def admit(self, step: int, update: UpdateRows, rows: int) -> int | None:
        """Announce a micro-batch of ``rows`` rows; call it for each micro-batch of an update, in the order of use.

        Returns:
            Gradient steps of ``step`` before this micro-batch, for ``put``. None if the micro-batch must not be
            recorded, because its rows were already used in this update, recording has stopped, or recording it would
            take too much of the step's time.
        """
        if (step, update.update) != self._update:
            self._budget.begin(step, self.clock(), rows=update.rows, updates=update.updates - update.update)
            self._update, self._seen, self._holds = (step, update.update), 0, False
        before = self._seen
        if before >= update.rows:
            return None
        self._seen += rows
        if self.stopped is not None:
            with self._condition:
                self._counters.dropped_rows += rows
            return None
        if not self._budget.admits(rows):
            self._leave_out(rows, ends=self._seen >= update.rows)
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
        """Enqueue the rows that ``admit`` accepted."""
        self._holds, last = True, self._seen >= update.rows
        number = update.update if update.updates > 1 else None
        with self._condition:
            fits = self._waiting + packed.nbytes <= self.settings.max_waiting_bytes
            if fits:
                self._waiting += packed.nbytes
                self._counters.rows += packed.rows
            else:
                self._counters.dropped_rows += packed.rows
            self._items.append(Item(step, number, mini_batch, packed if fits else None, spec, tuple(reasons), last))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="offpolicy-record", daemon=True)
                self._thread.start()
            self._condition.notify()

    def stop(self, error: Exception, rows: int = 0) -> None:
        """Stop recording permanently, and log one warning that states the cause.

        Args:
            rows: number of accepted rows that are lost.
        """
        with self._condition:
            first, self.stopped = self.stopped is None, self.stopped or self._writer.why(error)
            self._counters.dropped_rows += rows
        if first:
            # A disk error is logged without a traceback.
            trace = None if isinstance(error, OSError | OverLimit) else error
            logger.warning("%s Recording stops, and training continues.", self.stopped, exc_info=trace)

    def spent(self, seconds: float) -> None:
        """Add the time that the training thread has spent on recording."""
        self._budget.spent(seconds)
        with self._condition:
            self._counters.seconds += seconds

    def take(self) -> Counters:
        """Return the counts since the last call, and reset them."""
        with self._condition:
            counters, self._counters = self._counters, Counters()
        return counters

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all queued rows, even of incomplete steps, are written; return False if this takes too long."""
        with self._condition:
            self._items.append(None)
            self._condition.notify()
            if self._thread is None:
                self._items.clear()
                return True
            return self._condition.wait_for(lambda: not self._items and not self._busy, timeout)

    def _leave_out(self, rows: int, *, ends: bool) -> None:
        """Drop rows that exceed the step's time budget; ``ends``: whether these rows are the last of their update."""
        if not self._warned:
            self._warned = True
            share = self.settings.share
            logger.warning(
                "%s.share=%g: recording would take more than %.2g s of this step (limit: %g of the last step's "
                "duration, or %g s in the first step). Rows are dropped evenly over the step, and training "
                "continues. Set %s.share=%.2g or %s.prompts=false.",
                *(SECTION, share, self._budget.allowed, MOST_TIME, FIRST, SECTION, share / 2, SECTION),
            )
        with self._condition:
            self._counters.dropped_rows += rows
            if ends and self._holds:
                self._items.append(None)
                self._condition.notify()

    def _run(self) -> None:
        """Run the writer's thread."""
        with contextlib.suppress(OSError, AttributeError):
            # On Linux, each thread has its own niceness, so training has priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: bool(self._items))
                item = self._items.popleft()
                self._busy = True
            try:
                if item is None:
                    self._writer.close()
                elif self.stopped is None:
                    self._writer.add(item)
                else:
                    self._writer.drop(item)
            except Exception as error:  # training continues after any failure
                self.stop(error)
            outcome, self._writer.outcome = self._writer.outcome, Outcome()
            with self._condition:
                self._waiting -= outcome.released
                self._counters.dropped_rows += outcome.dropped_rows
                self._counters.bytes += outcome.written


_RECORDERS: dict[tuple[str, int], Recorder] = {}


def get_recorder(settings: RecordSettings, *, rank: int, ranks: int) -> Recorder:
    """Get or create this process's recorder for the directory. The recorder outlives the losses that use it."""
    key = (settings.dir, rank)
    recorder = _RECORDERS.get(key)
    if recorder is None or recorder.settings != settings:
        if recorder is not None:
            recorder.flush()
        elif not _RECORDERS:
            # A process that exits normally still writes its queued rows.
            atexit.register(flush_all)
        recorder = _RECORDERS[key] = Recorder(settings, rank=rank, ranks=ranks)
    return recorder


def flush_all(timeout: float = 30.0) -> None:
    """Flush every recorder in this process."""
    for recorder in _RECORDERS.values():
        recorder.flush(timeout)
