"""Counts of one run whose staleness is bounded, for ``offpolicy/staleness/``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROOT = "offpolicy/staleness"


@dataclass
class Lengths:
    """Sum and number of response lengths."""

    total: int = 0
    rows: int = 0

    def add(self, lengths: Iterable[int]) -> None:
        """Add the lengths of some rows."""
        for length in lengths:
            self.total += length
            self.rows += 1

    @property
    def mean(self) -> float:
        """NaN of no rows."""
        return self.total / self.rows if self.rows else math.nan


@dataclass
class Tally:
    """Counts of the running step, and lengths since the run began.

    Attributes:
        issued, refreshed, lost: prompts: issued, sampled anew, and gone without being trained, failed, filtered or
            replaced by themselves.
        room: prompts that the step had room for when it began.
        waited: seconds that the trainer waited for rows.
        tokens, masked_tokens: of the rows that were sampled for training, and of these of masked rows.
        too_old, trained: lengths of rows that were too old, whatever became of them, and of the others.
    """

    issued: int = 0
    refreshed: int = 0
    lost: int = 0
    room: int = 0
    waited: float = 0.0
    tokens: int = 0
    masked_tokens: int = 0
    too_old: Lengths = field(default_factory=Lengths)
    trained: Lengths = field(default_factory=Lengths)

    def begin(self) -> None:
        """Forget the last step."""
        self.issued = self.refreshed = self.lost = self.room = self.tokens = self.masked_tokens = 0
        self.waited = 0.0

    def add_rows(self, kept: Sequence[int], too_old: Sequence[int]) -> None:
        """Add the response lengths of the rows of one update, and of those that leave its loss."""
        self.trained.add(kept)
        self.too_old.add(too_old)
        self.masked_tokens += sum(too_old)
        self.tokens += sum(kept) + sum(too_old)

    def metrics(self, eta: float) -> dict[str, float]:
        """Return the metrics of the step, by the names that the logger gets."""
        values = {
            "eta": eta,
            "issued": self.issued,
            "room": self.room,
            "waited_seconds": self.waited,
            "refreshed": self.refreshed,
            "masked_token_share": self.masked_tokens / self.tokens if self.tokens else 0.0,
            "lost_prompts": self.lost,
            "length_ratio": self.too_old.mean / self.trained.mean if self.trained.total else math.nan,
        }
        return {f"{ROOT}/{name}": float(value) for name, value in values.items()}
