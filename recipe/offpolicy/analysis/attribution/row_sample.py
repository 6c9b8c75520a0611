"""Sample of a recording's rows: all of a small one, the rows of some prompts of a large one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...recording import Rows

STEPS: Final = 64
"""Most steps of a sample that is not of all rows, evenly spread."""
BYTES_A_TOKEN: Final = 12
"""Of a recorded file, compressed: nine columns, of which the log-probs hardly compress."""


@dataclass(frozen=True)
class RowSample:
    """The rows to take.

    Attributes:
        steps: of which rows are taken; None: of all steps, all rows.
        tokens: most of each step; at least one prompt is taken.
    """

    steps: frozenset[int] | None = None
    tokens: int = 0

    @classmethod
    def of_steps(cls, steps: Sequence[int], tokens: int) -> RowSample:
        """Choose at most ``STEPS`` of the steps, with so many tokens together."""
        places = np.linspace(0, len(steps) - 1, min(len(steps), STEPS)).round().astype(int)
        chosen = frozenset(steps[place] for place in places)
        return cls(chosen, tokens // max(len(chosen), 1))

    def choose(self, rows: Rows, *, spare: bool = False) -> NDArray[np.int64]:
        """Choose rows, of one step: those of some prompts, the same ones in every step.

        Args:
            spare: one prompt more, so that a choice among what was chosen of each piece is the choice of the step.
        """
        if self.steps is None or not len(rows):
            return np.arange(len(rows))
        if int(rows.step[0]) not in self.steps:
            return np.arange(0)
        bounds = zip(rows.prompt_offsets[:-1], rows.prompt_offsets[1:], rows.uid, strict=True)
        # A hash of the prompt draws the same prompts in every step, without state between the steps.
        drawn = np.array([crc32(rows.prompt_ids[a:b].tobytes() or str(uid).encode()) for a, b, uid in bounds])
        _, of_row = np.unique(drawn, return_inverse=True)
        ends = np.cumsum(np.bincount(of_row, weights=np.diff(rows.offsets)))
        return np.flatnonzero(of_row < max(int((ends <= self.tokens).sum()) + spare, 1))
