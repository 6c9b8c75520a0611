"""Selection of recorded rows: a sample of prompts, and rows whose log pi_old under the trainer's weights is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...recording import Rows, Step, concatenate
from ...recording.recording import find_scored_rows, get_trainers_pi_old

STEPS: Final = 64
"""Largest number of steps in a sample that does not contain all rows; these steps are evenly spread."""
BYTES_A_TOKEN: Final = 12
"""Compressed size of a token in a recorded file, in bytes; of the token's nine columns, the log-probs hardly
compress."""


@dataclass(frozen=True)
class RowSample:
    """Which rows to read from a recording.

    Attributes:
        steps: steps from which rows are taken; None to take all rows of all steps.
        tokens: largest number of tokens from each step; at least one prompt is taken.
    """

    steps: frozenset[int] | None = None
    tokens: int = 0

    @classmethod
    def of_steps(cls, steps: Sequence[int], tokens: int) -> RowSample:
        """Choose at most ``STEPS`` of the steps, evenly spread, with ``tokens`` tokens in total."""
        places = np.linspace(0, len(steps) - 1, min(len(steps), STEPS)).round().astype(int)
        chosen = frozenset(steps[place] for place in places)
        return cls(chosen, tokens // max(len(chosen), 1))

    def choose(self, rows: Rows, *, spare: bool = False) -> NDArray[np.int64]:
        """Choose rows of one step: all rows of certain prompts, where the set of prompts is the same in every step.

        Args:
            spare: whether to choose one more prompt, so that choosing again among the rows chosen from the pieces
                yields the same rows as choosing from the whole step.
        """
        if self.steps is None or not len(rows):
            return np.arange(len(rows))
        if int(rows.step[0]) not in self.steps:
            return np.arange(0)
        bounds = zip(rows.prompt_offsets[:-1], rows.prompt_offsets[1:], rows.uid, strict=True)
        # Prompts are chosen by their hash, so every step uses the same prompts without any state between steps.
        drawn = np.array([crc32(rows.prompt_ids[a:b].tobytes() or str(uid).encode()) for a, b, uid in bounds])
        _, of_row = np.unique(drawn, return_inverse=True)
        ends = np.cumsum(np.bincount(of_row, weights=np.diff(rows.offsets)))
        return np.flatnonzero(of_row < max(int((ends <= self.tokens).sum()) + spare, 1))


@dataclass(frozen=True)
class ScoredRows:
    """The rows to attribute, and the number of rows that are left out.

    Attributes:
        rows: rows whose ``old_log_prob`` is log pi_old under the trainer's own weights.
        left_out: number of rows from later gradient steps, whose pi_old is unknown. If there are any, the effect of the
            updates is not identified.
    """

    rows: Rows
    left_out: int


def select_scored_rows(parts: Iterable[Step]) -> ScoredRows:
    """Select the rows of all ``parts`` whose log pi_old is known.

    Raises:
        ValueError: there is no part.
    """
    rows, left_out = [], 0
    for part in parts:
        known = find_scored_rows(part)
        scored = replace(part.rows, old_log_prob=get_trainers_pi_old(part))
        rows.append(scored if known.all() else scored.take(np.flatnonzero(known)))
        left_out += int((~known).sum())
    return ScoredRows(concatenate(rows), left_out)


def describe_left_out(left_out: int) -> str:
    """Describe the rows that are left out of an attribution; empty if there are none."""
    if not left_out:
        return ""
    return (
        f"{left_out} rows of later gradient steps are left out, and drift is not identified: the trainer's pi_old was "
        f"not recorded. Record with correction.proximal=recompute to include them."
    )


def describe_none_scored(left_out: int) -> str:
    """Explain why nothing can be attributed if all rows are left out, and suggest a fix, without a final full stop."""
    return (
        f"{left_out} rows are recorded, but none during the first gradient step of a training step, and the trainer's "
        f"pi_old was not recorded. Record with correction.proximal=recompute"
    )
