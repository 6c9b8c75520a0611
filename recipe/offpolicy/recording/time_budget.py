"""Time budget of the recorder: the share of a step that it may take from the training thread."""

from __future__ import annotations

from collections import deque

MOST_TIME = 0.05
"""Share of a step that recording may take from the training thread, relative to the duration of the last step."""
FIRST = 1.0
"""Seconds that it may take of the first step, when no duration is known."""
_ROUNDING = 1e-9


class TimeBudget:
    """Admits micro-batches while the measured cost of earlier ones fits the step's budget.

    The cost of a micro-batch is known after it has been recorded: seconds per row of the latest one, and across steps
    the smaller of the latest two, so one slow moment does not stop recording. If an update does not fit completely, the
    admitted micro-batches are spread evenly over it, because later mini-batches meet staler rows.

    Attributes:
        allowed: seconds of the current step.
        taken: seconds used in the current step so far.
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
            step: from 1; some steps may have no update.
            now: seconds.
            rows: number of rows of this update.
            updates: number of remaining updates of this step, including this one.
        """
        if step != self._step:
            if self._step is not None and step > self._step:
                self.allowed = MOST_TIME * (now - self._began) / (step - self._step)
            self._step, self._began, self.taken = step, now, 0.0
            # A cost measured once may be that of a first call, so it is measured again.
            self._cost = min(self._costs) if len(self._costs) == 2 else 0.0
        left, needed = (self.allowed - self.taken) / max(updates, 1), self._cost * rows
        self._share = min(1.0, max(left, 0.0) / needed) if needed > 0 else 1.0

    def admits(self, rows: int) -> bool:
        """Return True if a micro-batch of ``rows`` rows must be recorded."""
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
