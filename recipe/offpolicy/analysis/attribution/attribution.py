"""Attribution of a recording's mismatch: decomposition, profiles, worst examples and causes in one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...recording import Recording, RecordingError, Rows
from .causes import Cause, find_causes_in_rows
from .decomposition import (
    Decomposition,
    VersionMismatch,
    decompose,
    decompose_by_step,
    drop_drift,
    merge_backend_and_staleness,
    summarize_by_version,
)
from .faults import describe_faults, has_unnoticed_staleness
from .profiles import Bucket, clear_drift_std, compute_profiles, select_valid_tokens
from .row_sums import compute_routing_sums, compute_row_sums
from .scored_rows import describe_none_scored, select_scored_rows
from .token_text import load_decoder
from .worst_examples import WorstRow, WorstToken, find_worst_rows, find_worst_tokens

WORST = 12
"""Number of tokens and of rows that are listed."""
_MEMORY = 62.0
"""Bytes of memory a byte of a recording takes: 20 M tokens of 12 bytes took 14.4 GB."""
_MUCH = 4e9
"""Bytes of memory from which a warning is given."""


@dataclass(frozen=True)
class Attribution:
    """The result of attributing a recording's mismatch.

    Attributes:
        steps: recorded steps that were read.
        rows: number of rows that are attributed.
        left_out: number of rows without pi_old, see ``scored_rows.ScoredRows``.
        whole: decomposition over all rows.
        by_step: decomposition of each step.
        versions: mismatch by the age of the weights that sampled a token.
        profiles: mismatch by position, length, probability, turn and staleness.
        tokens, worst: tokens and rows with the largest mismatch, with their text.
        without_text: why ids are shown instead of text; empty where text is.
        causes: verdict on each possible cause.
        mend_first: sentence on the faults to mend before a bound is set, see ``faults.describe_faults``; or empty.
    """

    steps: Sequence[int]
    rows: int
    left_out: int
    whole: Decomposition
    by_step: Mapping[int, Decomposition]
    versions: Sequence[VersionMismatch]
    profiles: Mapping[str, Sequence[Bucket]]
    tokens: Sequence[WorstToken]
    worst: Sequence[WorstRow]
    without_text: str
    causes: Sequence[Cause]
    mend_first: str


def attribute(recording: Recording, *, steps: tuple[int, int | None] | None = None, worst: int = WORST) -> Attribution:
    """Read a recording and attribute its mismatch.

    Args:
        steps: first and last step to read, a last of None being the last recorded; None: all.
        worst: tokens and rows to list.

    Raises:
        RecordingError: a file is damaged, no such step or no token was recorded, or pi_old of none is known.
    """
    first, last = steps or (recording.steps[0], None)
    chosen = _chosen(recording, steps)
    if not chosen:
        asked = f"from {first} on" if last is None else f"from {first} to {last}"
        raise RecordingError(
            f"{recording.directory}: no step {asked} is recorded; there are {recording.steps[0]} to "
            f"{recording.steps[-1]}."
        )
    found = select_scored_rows(part for step in chosen for part in recording.corrections(step))
    return attribute_rows(found.rows, recording.card, worst=worst, left_out=found.left_out)


def check_memory(recording: Recording, steps: tuple[int, int | None] | None = None) -> str:
    """Estimate from file sizes the memory that ``attribute`` takes; return a warning with a remedy, or ""."""
    chosen = _chosen(recording, steps)
    size = sum(path.stat().st_size for step in chosen for path in recording.files[step])
    memory = _MEMORY * size
    if memory < _MUCH or not chosen:
        return ""
    warning = (
        f"steps {chosen[0]} to {chosen[-1]}, {size / 1e6:,.0f} MB, are read together, which takes about "
        f"{memory / 1e9:.0f} GB of memory."
    )
    most = max(int(len(chosen) * _MUCH / memory), 1)
    if most == len(chosen):
        return f"{warning} Record fewer rows a step: offpolicy.record.share=0.1."
    return (
        f"{warning} With --steps {chosen[0]}:{chosen[most - 1]} it is about {memory * most / len(chosen) / 1e9:.1f} GB."
    )


def _chosen(recording: Recording, steps: tuple[int, int | None] | None) -> list[int]:
    """List the recorded steps within the range."""
    first, last = steps or (recording.steps[0], None)
    return [step for step in recording.steps if first <= step and (last is None or step <= last)]


def attribute_rows(rows: Rows, card: Mapping[str, Any], *, worst: int = WORST, left_out: int = 0) -> Attribution:
    """Attribute the mismatch of rows.

    Args:
        rows: with log pi_old by the trainer's own weights, as ``scored_rows.select_scored_rows`` gives them.
        left_out: rows besides whose pi_old is not known.

    Raises:
        RecordingError: they have no token with finite log-probs.
    """
    if left_out and not len(rows):
        raise RecordingError(f"{describe_none_scored(left_out)}.")
    tokens = select_valid_tokens(rows)
    if not len(tokens.row):
        raise RecordingError(f"{len(rows)} rows are recorded, and no token with finite log-probs. Record other steps.")
    sums = compute_row_sums(rows)
    reader, why = load_decoder(card)
    routing = compute_routing_sums(rows)
    whole, steps = decompose(sums, routing=routing), decompose_by_step(sums, rows.step, routing)
    buckets = compute_profiles(rows, tokens)
    if left_out:
        whole, steps = drop_drift(whole), {step: drop_drift(part) for step, part in steps.items()}
        buckets = {name: clear_drift_std(of_name) for name, of_name in buckets.items()}
    causes, versions = find_causes_in_rows(rows, card), summarize_by_version(sums, rows)
    if has_unnoticed_staleness(causes, rows):
        whole = merge_backend_and_staleness(whole)
        steps = {step: merge_backend_and_staleness(part) for step, part in steps.items()}
        versions = [replace(version, backend=None) for version in versions]
    return Attribution(
        steps=[int(step) for step in np.unique(rows.step)],
        rows=len(rows),
        left_out=left_out,
        whole=whole,
        by_step=steps,
        versions=versions,
        profiles=buckets,
        tokens=find_worst_tokens(rows, tokens, reader, worst),
        worst=find_worst_rows(rows, tokens, reader, worst),
        without_text=why,
        causes=causes,
        mend_first=describe_faults(causes, rows),
    )
