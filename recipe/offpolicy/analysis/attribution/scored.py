"""The recorded rows that can be attributed: those whose log pi_old by the trainer's own weights is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ...recording import Rows, Step, concatenated
from ...recording.pi_old import scored_rows, trainers_pi_old


@dataclass(frozen=True)
class Scored:
    """Rows to attribute.

    Attributes:
        rows: with log pi_old by the trainer's own weights as ``old_log_prob``.
        left_out: rows besides, whose pi_old is not known: of later gradient steps. Where there are any, what the
            updates did is not identified.
    """

    rows: Rows
    left_out: int


def scored(parts: Iterable[Step]) -> Scored:
    """Of all ``parts``.

    Raises:
        ValueError: there is no part.
    """
    rows, left_out = [], 0
    for part in parts:
        known = scored_rows(part)
        rows.append(replace(part.rows, old_log_prob=trainers_pi_old(part)).take(np.flatnonzero(known)))
        left_out += int((~known).sum())
    return Scored(concatenated(rows), left_out)


def left_out_note(left_out: int) -> str:
    """What is said of rows beside those that are attributed; empty where there are none."""
    if not left_out:
        return ""
    return (
        f"{left_out} rows of later gradient steps are left out, and drift is not identified: pi_old of the trainer was "
        f"not recorded. Record with correction.proximal=recompute to see them."
    )


def none_scored(left_out: int) -> str:
    """Why nothing can be attributed where all rows are left out, and what to do; without a full stop."""
    return (
        f"{left_out} rows are recorded, none at the first gradient step of its step, and pi_old of the trainer was not "
        f"recorded. Record with correction.proximal=recompute"
    )
