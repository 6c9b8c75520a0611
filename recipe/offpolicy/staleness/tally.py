"""Counts of one run whose staleness is bounded, for ``offpolicy/staleness/``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .ages import RowTag, compute_age

ROOT = "offpolicy/staleness"


@dataclass
class Mean:
    """Sum and number of values."""

    total: float = 0
    count: float = 0

    def add(self, values: Iterable[float]) -> None:
        """Add some values."""
        for value in values:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float:
        """NaN of no values."""
        return self.total / self.count if self.count else math.nan


@dataclass
class Tally:
    """Counts of the running step, and lengths since the run began.

    Attributes:
        issued, refreshed, lost: prompts: issued, sampled anew, and gone without being trained, failed, filtered or
            replaced by themselves.
        room: prompts that the step had room for when it began.
        waited: seconds that the trainer waited for rows.
        tokens, masked_tokens: of the rows that were sampled for training, and of these of masked rows.
        in_flight, in_queue: versions that came while a row was sampled, and since it was finished, of rows in the loss.
        spans: versions that sampled a row, of rows that note them by token.
        updates: age of a token in updates.
        too_old, trained: lengths of rows that were too old, whatever became of them, and of the others.
    """

    issued: int = 0
    refreshed: int = 0
    lost: int = 0
    room: int = 0
    waited: float = 0.0
    tokens: int = 0
    masked_tokens: int = 0
    in_flight: Mean = field(default_factory=Mean)
    in_queue: Mean = field(default_factory=Mean)
    spans: Mean = field(default_factory=Mean)
    updates: Mean = field(default_factory=Mean)
    too_old: Mean = field(default_factory=Mean)
    trained: Mean = field(default_factory=Mean)

    def begin(self) -> None:
        """Forget the last step."""
        self.issued = self.refreshed = self.lost = self.room = self.tokens = self.masked_tokens = 0
        self.waited = 0.0
        self.in_flight, self.in_queue, self.spans, self.updates = Mean(), Mean(), Mean(), Mean()

    def add_rows(self, kept: Sequence[RowTag], too_old: Sequence[RowTag], step: int) -> None:
        """Add the rows of one update of ``step``, and those that leave its loss."""
        self.trained.add(row.length for row in kept)
        self.too_old.add(row.length for row in too_old)
        masked = sum(row.length for row in too_old)
        self.masked_tokens += masked
        self.tokens += masked + sum(row.length for row in kept)
        self.in_flight.add(row.newest - row.version for row in kept)
        self.in_queue.add(compute_age(row.newest, step) for row in kept)

    def add_ages(self, mean: float, tokens: float, *, update: int, updates: int) -> None:
        """Add the mean age of the tokens of one update, in versions.

        Args:
            update: updates of the step before this one.
            updates: in a step, which makes one version.
        """
        if tokens:
            self.updates.total += tokens * (mean * updates + update)
            self.updates.count += tokens

    def metrics(self, eta: float, waited_share: float) -> dict[str, float]:
        """Return the metrics of the step, by the names that the logger gets.

        Args:
            waited_share: of the step's seconds.
        """
        values = {
            "eta": eta,
            "issued": self.issued,
            "room": self.room,
            "waited_seconds": self.waited,
            "waited_share": waited_share,
            "refreshed": self.refreshed,
            "masked_token_share": self.masked_tokens / self.tokens if self.tokens else 0.0,
            "lost_prompts": self.lost,
            "length_ratio": self.too_old.value / self.trained.value if self.trained.total else math.nan,
            "in_flight": self.in_flight.value,
            "in_queue": self.in_queue.value,
            "spans": self.spans.value,
            "updates_mean": self.updates.value,
        }
        return {f"{ROOT}/{name}": float(value) for name, value in values.items()}
