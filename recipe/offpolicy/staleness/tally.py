"""Counts of a run with bounded staleness, for ``offpolicy/staleness/``."""

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
        """Add values."""
        for value in values:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float:
        """Mean of the values; NaN if there are none."""
        return self.total / self.count if self.count else math.nan


@dataclass
class Tally:
    """Counts of the current step, and lengths since the run began.

    Attributes:
        issued, refreshed, lost: prompts that were issued, sampled again, and lost (not trained, failed, filtered or
            replaced).
        room: prompts that the step could issue when it began.
        waited: seconds that the trainer waited for rows.
        tokens, masked_tokens: tokens of the rows that were taken for training, and of the masked rows among them.
        in_flight, in_queue: number of versions made while a row was sampled and after it was finished, for rows in the
            loss.
        spans: number of versions that sampled a row, for rows with per-token versions.
        updates: age of a token in updates.
        too_old, trained: lengths of rows that were too old, however they were treated, and of the other rows.
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
        """Reset the step's counts."""
        self.issued = self.refreshed = self.lost = self.room = self.tokens = self.masked_tokens = 0
        self.waited = 0.0
        self.in_flight, self.in_queue, self.spans, self.updates = Mean(), Mean(), Mean(), Mean()

    def add_rows(self, kept: Sequence[RowTag], too_old: Sequence[RowTag], step: int) -> None:
        """Add the rows of one update of ``step``, and those removed from its loss."""
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
            update: number of earlier updates in the step.
            updates: number of updates per step; a step makes one version.
        """
        if tokens:
            self.updates.total += tokens * (mean * updates + update)
            self.updates.count += tokens

    def metrics(self, eta: float, waited_share: float) -> dict[str, float]:
        """Return the metrics of the step, under their logged names.

        Args:
            waited_share: share of the step's seconds.
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
