"""Selection of the recorded rows whose log pi_old by the trainer's own weights is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ...recording import Rows, Step, concatenate
from ...recording.pi_old import find_scored_rows, get_trainers_pi_old


@dataclass(frozen=True)
class ScoredRows:
    """Rows to attribute, and the count of those left out.

    Attributes:
        rows: with log pi_old by the trainer's own weights as ``old_log_prob``.
        left_out: rows besides, whose pi_old is not known: of later gradient steps. Where there are any, what the
            updates did is not identified.
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
    """Describe the rows that are left out of an attribution; empty where there are none."""
    if not left_out:
        return ""
    return (
        f"{left_out} rows of later gradient steps are left out, and drift is not identified: pi_old of the trainer was "
        f"not recorded. Record with correction.proximal=recompute to see them."
    )


def describe_none_scored(left_out: int) -> str:
    """Say why nothing can be attributed where all rows are left out, with the fix; without a full stop."""
    return (
        f"{left_out} rows are recorded, none at the first gradient step of its step, and pi_old of the trainer was not "
        f"recorded. Record with correction.proximal=recompute"
    )
