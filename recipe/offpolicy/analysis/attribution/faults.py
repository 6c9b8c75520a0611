"""Faults to fix before a bound is set, because a bound that is chosen from a faulty run's mismatch fits the fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...recording import Recording, Rows, Step
from ...recording.recording import join_alike
from ..jobs import ALONE, Jobs, map_steps
from .causes import Cause, find_causes_in_rows, numerics, stale_weights
from .causes.find import judge_delivery, withdraw_staleness
from .scored_rows import RowSample, select_scored_rows

TOKENS = 400_000
"""Largest number of tokens in the sample that is searched for causes."""


def has_stale_tokens(rows: Rows) -> bool:
    """Check whether any token is recorded as stale."""
    return bool(((rows.token_staleness > 0) & rows.response_mask).any())


def has_unnoticed_staleness(causes: Iterable[Cause], *, stale: bool) -> bool:
    """Check whether stale weights were found although no token is recorded as ``stale``."""
    found = any(cause.name == stale_weights.NAME and cause.verdict == "present" for cause in causes)
    return found and not stale


def describe_faults(causes: Iterable[Cause], *, stale: bool) -> str:
    """Name the faults among ``causes`` in a sentence; empty if there is none.

    Numerics, and older weights whose age was recorded, are not faults: a correction handles them.

    Args:
        stale: whether a token is recorded as stale.
    """
    causes = list(causes)
    meant = {numerics.NAME} if has_unnoticed_staleness(causes, stale=stale) else {numerics.NAME, stale_weights.NAME}
    faults = [cause for cause in causes if cause.verdict == "present" and cause.name not in meant]
    if not faults:
        return ""
    named = "; ".join(f"{cause.name} ({cause.fix})" if cause.fix else cause.name for cause in faults)
    return (
        f"The mismatch has a cause that must be fixed first: {named}. A bound that is set from this recording fits "
        f"that cause, not a run without it."
    )


def describe_recorded_faults(recording: Recording, card: Mapping[str, Any], jobs: Jobs = ALONE) -> str:
    """Name the faults in a sample of a recording's rows; see ``describe_faults``; empty if there is none.

    Args:
        card: the recording's card.
        jobs: the processes that read the steps of the sample.
    """
    sample = RowSample.of_steps(recording.steps, TOKENS)
    assert sample.steps is not None, "of some steps"
    some = recording.only(*sorted(sample.steps))
    kept = [
        part
        for parts in map_steps(partial(_take_sample, sample), some, jobs, "sampling", in_pieces=True)
        for part in parts
    ]
    if not kept:
        return ""
    rows = select_scored_rows(kept).rows
    causes = find_causes_in_rows(rows, card) if len(rows) else []
    delivery, stale = judge_delivery(recording.delivery), has_stale_tokens(rows)
    return describe_faults([*delivery, *withdraw_staleness(delivery, causes, stale=stale)], stale=stale)


def _take_sample(sample: RowSample, steps: Iterable[Step]) -> list[Step]:
    """Take a step's sample for each correction that acted in it; the step arrives in pieces."""
    kept: list[Step] = []
    for piece in steps:
        kept = [_take(step, sample.choose(step.rows, spare=True)) for step in join_alike([*kept, piece])]
    chosen = (_take(step, sample.choose(step.rows)) for step in kept)
    return [step for step in chosen if len(step.rows)]


def _take(step: Step, rows: NDArray[np.int64]) -> Step:
    return Step(step.rows.take(rows), step.spec, step.reasons)
