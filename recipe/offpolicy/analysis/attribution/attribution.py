"""Attribution of a recording's mismatch: decomposition, profiles, worst examples, causes, and faults to fix first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from ...monitor.mismatch_shares import COLUMNS, RECENT
from ...recording import Recording, RecordingError, Rows, concatenate
from ..jobs import ALONE, Jobs
from .cause import NUMERICS, STALE, Cause
from .causes import find_causes
from .decomposition import (
    PROFILES,
    Bucket,
    Decomposition,
    VersionMismatch,
    build_profiles,
    compute_routing_sums,
    count_by_age,
    decompose,
    drop_shares,
    merge,
    place_cells,
    resample,
    sum_cells,
    summarize_by_version,
)
from .partial_causes import judge_delivery, withdraw_staleness
from .recorded_tokens import BYTES_A_TOKEN, Array, RowSample, describe_none_scored, select_scored_rows
from .worst_examples import WorstRow, WorstToken, build_examples, find_worst, load_decoder, merge_copies


def has_stale_tokens(rows: Rows) -> bool:
    """Return True if any token is recorded as stale."""
    return bool(((rows.token_staleness > 0) & rows.response_mask).any())


def has_unnoticed_staleness(causes: Iterable[Cause], *, stale: bool) -> bool:
    """Return True if stale weights were found although no token is recorded as ``stale``."""
    return not stale and any(cause.name == STALE and cause.verdict == "present" for cause in causes)


def describe_faults(causes: Sequence[Cause], *, stale: bool) -> str:
    """Name the faults among ``causes`` in a sentence; empty if there are none.

    Numerics, and older weights with a recorded age, are not faults, because a correction can handle them.

    Args:
        stale: whether a token is recorded as stale.
    """
    meant = {NUMERICS} if has_unnoticed_staleness(causes, stale=stale) else {NUMERICS, STALE}
    faults = [cause for cause in causes if cause.verdict == "present" and cause.name not in meant]
    if not faults:
        return ""
    named = "; ".join(f"{cause.name} ({cause.fix})" if cause.fix else cause.name for cause in faults)
    return (
        f"The mismatch has a cause that must be fixed first: {named}. A bound calibrated on this recording would only "
        f"fit this fault."
    )


def _add_delivery(causes: Sequence[Cause], lines: Sequence[Mapping[str, Any]], *, stale: bool) -> list[Cause]:
    """Add the verdicts on a run's synchronisations, and withdraw verdicts that contradict them."""
    delivery = judge_delivery(lines)
    return [*delivery, *withdraw_staleness(delivery, causes, stale=stale)]


TOKENS = 400_000
"""Largest number of tokens in the sample that ``describe_recorded_faults`` searches for causes."""


def describe_recorded_faults(recording: Recording, card: Mapping[str, Any], jobs: Jobs = ALONE) -> str:
    """Name the faults in a sample of a recording's rows, in the form of ``describe_faults``; empty if there are none.

    Args:
        card: the recording's card.
        jobs: the processes that read the steps of the sample.
    """
    sample = RowSample.of_steps(recording.steps, TOKENS)
    steps = [recording.only(step) for step in recording.steps if step in (sample.steps or ())]
    rows = concatenate(list(jobs.map(partial(_sample_step, sample), steps, "sampling")))
    stale = has_stale_tokens(rows)
    return describe_faults(_add_delivery(find_causes(rows, card), recording.delivery, stale=stale), stale=stale)


def _sample_step(sample: RowSample, recording: Recording) -> Rows:
    (step,) = recording.steps
    pieces = recording.in_pieces().pieces(step)
    return sample.take(concatenate([sample.take(select_scored_rows(piece)[0], spare=True) for piece in pieces]))


@dataclass(frozen=True)
class Part:
    """Partial result of an attribution, computed from some of the rows.

    Attributes:
        rows: number of rows that are attributed.
        left_out: number of rows without pi_old, see ``select_scored_rows``.
        sums: the result of ``resample``, in the form that ``decompose`` requires.
        cells: sums over the buckets of all ``PROFILES``; see ``merge``.
        ages: for each staleness, the number of rows with a token of that staleness.
        tokens, worst: the worst examples (see ``find_worst``), with row numbers that start at the part's first row.
        stale: whether any token is recorded as stale.
        samples: rows that are searched for causes.
    """

    rows: int
    left_out: int
    sums: Mapping[str, Array]
    cells: pl.DataFrame
    ages: Counter[int]
    tokens: pl.DataFrame
    worst: pl.DataFrame
    stale: bool
    samples: tuple[Rows, ...]


def summarize_rows(rows: Rows, seed: tuple[int, ...], *, worst: int, left_out: int = 0) -> Part:
    """Summarize rows of one step; the sample consists of all these rows.

    Args:
        rows: rows with log pi_old under the trainer's own weights.
        seed: seed of the bootstrap draws.
        worst: number of worst tokens, and of worst rows, to list.
        left_out: number of further rows whose pi_old is unknown.
    """
    cells, loss = sum_cells(rows)
    sums = {"recorded": place_cells(cells, len(rows)), **compute_routing_sums(rows)}
    worst_tokens, worst_rows = find_worst(rows, sums["recorded"], loss, worst)
    return Part(
        rows=len(rows),
        left_out=left_out,
        sums={name: resample(each, seed) for name, each in sums.items()},
        cells=merge(cells, *PROFILES),
        ages=count_by_age(cells, rows),
        tokens=worst_tokens,
        worst=worst_rows,
        stale=has_stale_tokens(rows),
        samples=(rows,),
    )


def join_parts(parts: Iterable[Part], worst: int) -> Part:
    """Add up parts of successive rows, keeping the sums of only one part in memory at a time."""
    sums: dict[str, Array] = {}
    joined: list[Part] = []
    rows = 0
    for part in parts:
        sums |= {name: each + sums.get(name, 0.0) for name, each in part.sums.items()}
        later = pl.col("row") + rows
        tokens, worst_rows = part.tokens.with_columns(later), part.worst.with_columns(later)
        joined.append(replace(part, sums={}, tokens=tokens, worst=worst_rows))
        rows += part.rows
    return Part(
        rows=rows,
        left_out=sum(part.left_out for part in joined),
        sums=sums,
        cells=merge(pl.concat([part.cells for part in joined]), *PROFILES),
        ages=sum((part.ages for part in joined), Counter()),
        tokens=merge_copies(pl.concat([part.tokens for part in joined]), worst),
        worst=merge_copies(pl.concat([part.worst for part in joined]), worst),
        stale=any(part.stale for part in joined),
        samples=tuple(rows for part in joined for rows in part.samples),
    )


WORST = 12
"""Number of worst tokens, and of worst rows, to list."""
SEARCHED = 1_000_000
"""Largest number of tokens in the sample that is searched for causes."""


@dataclass(frozen=True)
class Attribution:
    """The result of attributing a recording's mismatch.

    Attributes:
        steps: recorded steps that were read.
        rows: number of rows that are attributed.
        left_out: number of rows without pi_old, see ``select_scored_rows``.
        whole: decomposition over all rows.
        by_step: decomposition of each step.
        versions: mismatch by the age of the weights that sampled a token.
        profiles: mismatch by position, length, probability, turn and staleness.
        tokens, worst: tokens and rows with the largest mismatch, with their text.
        without_text: the reason why ids are shown instead of text; empty if text is shown.
        causes: the verdict on each possible cause.
        mend_first: sentence on the faults to fix before setting a bound, see ``describe_faults``; empty if there
            are none.
        searched: number of tokens in the sample that was searched for causes; 0 if all tokens were searched.
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
    searched: int = 0


def attribute(
    recording: Recording,
    *,
    steps: tuple[int, int | None] | None = None,
    worst: int = WORST,
    jobs: Jobs = ALONE,
    tokenizer: str = "",
) -> Attribution:
    """Read a recording step by step and attribute its mismatch.

    Args:
        steps: first and last step to read; None reads all steps, and a last step of None reads to the end of the
            recording.
        worst: number of worst tokens, and of worst rows, to list.
        jobs: the processes that read the steps.
        tokenizer: folder of the tokenizer that converts token ids to text; if empty, the recorded model's tokenizer.

    Raises:
        RecordingError: a file is damaged, no such step was recorded, no token was recorded, or pi_old is unknown for
            all rows.
    """
    chosen = recording.choose_steps(steps)
    size = sum(path.stat().st_size for step in chosen for path in recording.files[step])
    sample = RowSample.of_steps(chosen, SEARCHED) if size > SEARCHED * BYTES_A_TOKEN else RowSample()
    card = {**recording.card, **({"tokenizer": tokenizer} if tokenizer else {})}
    read = partial(_read_step, worst, sample)
    parts = jobs.map(read, [recording.only(step) for step in chosen], "attributing")
    return attribute_parts(
        zip(chosen, parts, strict=True), card, recording.delivery, worst=worst, sampled=sample.steps is not None
    )


def _read_step(worst: int, sample: RowSample, recording: Recording) -> Part:
    (step,) = recording.steps
    parts = []
    for place, steps in enumerate(recording.in_pieces().pieces(step)):
        rows, left_out = select_scored_rows(steps)
        part = summarize_rows(rows, (0, step, place), worst=worst, left_out=left_out)
        parts.append(replace(part, samples=(sample.take(rows, spare=True),)))
    whole = join_parts(parts, worst)
    return replace(whole, samples=(sample.take(concatenate(whole.samples)),))


def attribute_parts(
    parts: Iterable[tuple[int, Part]],
    card: Mapping[str, Any],
    delivery: Sequence[Mapping[str, Any]] = (),
    *,
    worst: int = WORST,
    sampled: bool = False,
) -> Attribution:
    """Add up the parts of the steps one after another, and search their samples for causes.

    Args:
        delivery: the run's synchronisation records, see ``judge_delivery``.
        sampled: whether the samples contain only some of the rows.
    """
    by_step: dict[int, Decomposition] = {}
    total: Part | None = None
    # Later steps are never used, because the shares of a step must not depend on later steps.
    before: deque[Array] = deque(maxlen=RECENT)
    for step, part in parts:
        if part.rows:
            by_step[step] = decompose(part.sums, np.sum(before, axis=0) if before else None)
            before.append(part.sums["recorded"][0])
        total = part if total is None else join_parts([total, part], worst)
    assert total is not None, "of some steps"
    if total.left_out and not total.rows:
        raise RecordingError(f"{describe_none_scored(total.left_out)}.")
    recorded = total.sums["recorded"][0]
    if not recorded.any():
        raise RecordingError(f"none of {total.rows} recorded rows has finite log-probs. Record other steps.")
    sample = concatenate(total.samples)
    causes = find_causes(sample, card)
    versions = summarize_by_version(total.cells, total.ages, recorded)
    unknown = ["drift"] if total.left_out else []
    if has_unnoticed_staleness(causes, stale=total.stale):
        unknown += ["backend", "staleness"]
        versions = [replace(version, backend=None) for version in versions]
    causes = _add_delivery(causes, delivery, stale=total.stale)
    (reader, without_text), k3 = load_decoder(card), float(recorded[..., COLUMNS.index("total_k3")].sum())
    return Attribution(
        steps=list(by_step),
        rows=total.rows,
        left_out=total.left_out,
        whole=drop_shares(decompose(total.sums), *unknown),
        by_step={step: drop_shares(found, *unknown) for step, found in by_step.items()},
        versions=versions,
        profiles=build_profiles(total.cells, drift=not total.left_out),
        tokens=build_examples(WorstToken, total.tokens, k3, reader),
        worst=build_examples(WorstRow, total.worst, k3, reader),
        without_text=without_text,
        causes=causes,
        mend_first=describe_faults(causes, stale=total.stale),
        searched=sample.tokens if sampled else 0,
    )
