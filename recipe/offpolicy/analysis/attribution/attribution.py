"""Attribution of a recording's mismatch: decomposition, profiles, worst examples, causes, and faults to fix first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...monitor.mismatch.shares import COLUMNS
from ...recording import Recording, RecordingError, Rows, Step, concatenate
from ...recording.recording import join_alike
from ..jobs import ALONE, Jobs, map_steps, show_progress
from .causes import Cause, find_causes_in_rows, numerics, stale_weights
from .causes.find import judge_delivery, withdraw_staleness
from .decomposition import (
    Array,
    Decomposition,
    StepDecomposer,
    VersionMismatch,
    decompose,
    drop_drift,
    merge_backend_and_staleness,
    resample,
    summarize_by_version,
)
from .frames import (
    PROFILES,
    Bucket,
    build_profiles,
    clear_drift_std,
    compute_routing_sums,
    count_by_age,
    merge,
    place_cells,
    sum_cells,
)
from .scored_rows import BYTES_A_TOKEN, RowSample, describe_none_scored, select_scored_rows
from .worst_examples import WorstRow, WorstToken, build_examples, find_worst, load_decoder, merge_copies

TOKENS = 400_000
"""Largest number of tokens in the sample that is searched for causes."""


def has_stale_tokens(rows: Rows) -> bool:
    """Check whether any token is recorded as stale."""
    return bool(((rows.token_staleness > 0) & rows.response_mask).any())


def has_unnoticed_staleness(causes: Iterable[Cause], *, stale: bool) -> bool:
    """Check whether stale weights were found even though no token is recorded as ``stale``."""
    found = any(cause.name == stale_weights.NAME and cause.verdict == "present" for cause in causes)
    return found and not stale


def describe_faults(causes: Iterable[Cause], *, stale: bool) -> str:
    """Name the faults among ``causes`` in a sentence; empty if there are none.

    Numerics, and older weights with a recorded age, are not faults, because a correction can handle them.

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
        f"The mismatch has a cause that must be fixed first: {named}. A bound set from this recording would fit that "
        "cause, and not a run without it."
    )


def describe_recorded_faults(recording: Recording, card: Mapping[str, Any], jobs: Jobs = ALONE) -> str:
    """Name the faults in a sample of a recording's rows, in the form of ``describe_faults``; empty if there are none.

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
    """Choose the sampled rows of a step, which arrives in pieces, once for each correction that acted in it."""
    kept: list[Step] = []
    for piece in steps:
        kept = [_take(step, sample.choose(step.rows, spare=True)) for step in join_alike([*kept, piece])]
    chosen = (_take(step, sample.choose(step.rows)) for step in kept)
    return [step for step in chosen if len(step.rows)]


def _take(step: Step, rows: NDArray[np.int64]) -> Step:
    return Step(step.rows.take(rows), step.spec, step.reasons)


_TOGETHER: Final = 64
"""Number of parts whose frames are added up together; a compromise between few group-bys and few parts in memory."""


@dataclass(frozen=True)
class Part:
    """Contribution of some rows to an attribution.

    Attributes:
        rows: number of rows that are attributed.
        left_out: number of rows without pi_old, see ``scored_rows.ScoredRows``.
        sums: the result of ``resample``, in the form that ``decompose`` requires.
        cells: sums over the buckets of all ``PROFILES``; see ``merge``.
        ages: for each staleness, the number of rows with a token of that staleness.
        tokens, worst: the worst examples (see ``find_worst``), with row numbers that start at the part's first row.
        stale: whether any token is recorded as stale.
        sample: rows that are searched for causes.
    """

    rows: int
    left_out: int
    sums: Mapping[str, Array]
    cells: pl.DataFrame
    ages: Counter[int]
    tokens: pl.DataFrame
    worst: pl.DataFrame
    stale: bool
    sample: Rows


def summarize_rows(rows: Rows, seed: tuple[int, ...], *, worst: int, left_out: int = 0) -> Part:
    """Summarize rows of one step; the sample consists of all these rows.

    Args:
        rows: rows with log pi_old under the trainer's own weights.
        seed: seed of the bootstrap draws.
        worst: number of tokens, and number of rows, to list.
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
        sample=rows,
    )


def join_parts(parts: Iterable[Part], worst: int) -> Part:
    """Add up parts of successive rows, keeping the sums of only one part in memory at a time."""
    sums: dict[str, Array] = {}
    joined: list[Part] = []
    rows = 0
    for part in parts:
        sums |= {name: each + sums.get(name, 0.0) for name, each in part.sums.items()}
        later = pl.col("row") + rows
        moved = {name: getattr(part, name).with_columns(later) for name in ("tokens", "worst")}
        joined.append(replace(part, sums={}, **moved))
        rows += part.rows
        if len(joined) == _TOGETHER:
            joined = [_join_frames(joined, worst)]
    return replace(_join_frames(joined, worst), sums=sums)


def _join_frames(parts: list[Part], worst: int) -> Part:
    samples = [part.sample for part in parts if len(part.sample)]
    return Part(
        rows=sum(part.rows for part in parts),
        left_out=sum(part.left_out for part in parts),
        sums={},
        cells=merge(pl.concat([part.cells for part in parts]), *PROFILES),
        ages=sum((part.ages for part in parts), Counter()),
        tokens=merge_copies(pl.concat([part.tokens for part in parts]), worst),
        worst=merge_copies(pl.concat([part.worst for part in parts]), worst),
        stale=any(part.stale for part in parts),
        sample=concatenate(samples or [parts[0].sample]),
    )


WORST = 12
"""Number of tokens, and number of rows, to list."""
SEARCHED = 1_000_000
"""Largest number of tokens in the sample that is searched for causes."""


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
        steps: first and last step to read; a last step of None means the last recorded step, and None means all steps.
        worst: number of tokens, and number of rows, to list.
        jobs: the processes that read the steps.
        tokenizer: folder of the tokenizer that converts token ids to text; if empty, the recorded model's tokenizer.

    Raises:
        RecordingError: a file is damaged, no such step was recorded, no token was recorded, or pi_old is unknown for
            all rows.
    """
    chosen = recording.choose_steps(steps)
    size = sum(path.stat().st_size for step in chosen for path in recording.files[step])
    sample = RowSample.of_steps(chosen, SEARCHED) if size > SEARCHED * BYTES_A_TOKEN else None
    card = {**recording.card, **({"tokenizer": tokenizer} if tokenizer else {})}
    read = partial(_read_step, worst, sample or RowSample())
    parts = show_progress(jobs.map(read, [recording.only(step) for step in chosen]), len(chosen), "attributing")
    found = _add_up(zip(chosen, parts, strict=True), card, worst=worst, sampled=sample is not None)
    delivery = judge_delivery(recording.delivery)
    if not delivery:
        return found
    stale = any(version.staleness > 0 for version in found.versions)
    causes = [*delivery, *withdraw_staleness(delivery, found.causes, stale=stale)]
    return replace(found, causes=causes, mend_first=describe_faults(causes, stale=stale))


def _read_step(worst: int, sample: RowSample, recording: Recording) -> Part:
    (step,) = recording.steps
    parts = []
    for place, steps in enumerate(recording.in_pieces().pieces(step)):
        found = select_scored_rows(steps)
        part = summarize_rows(found.rows, (0, step, place), worst=worst, left_out=found.left_out)
        parts.append(replace(part, sample=part.sample.take(sample.choose(part.sample, spare=True))))
    whole = join_parts(parts, worst)
    return replace(whole, sample=whole.sample.take(sample.choose(whole.sample)))


def _add_up(
    parts: Iterable[tuple[int, Part]], card: Mapping[str, Any], *, worst: int, sampled: bool = False
) -> Attribution:
    """Add up the parts of the steps one after another, and search the sampled rows for causes."""
    by_step: dict[int, Decomposition] = {}
    total = join_parts(_decompose_steps(parts, by_step), worst)
    if left_out := total.left_out:
        by_step = {step: drop_drift(found) for step, found in by_step.items()}
    if left_out and not total.rows:
        raise RecordingError(f"{describe_none_scored(left_out)}.")
    whole, buckets = decompose(total.sums), build_profiles(total.cells)
    recorded = total.sums["recorded"][0]
    if not recorded.any():
        raise RecordingError(
            f"{total.rows} rows are recorded, but none has a token with finite log-probs. Record other steps."
        )
    if left_out:
        whole = drop_drift(whole)
        buckets = {name: clear_drift_std(of_name) for name, of_name in buckets.items()}
    causes = find_causes_in_rows(total.sample, card)
    versions = summarize_by_version(total.cells, total.ages, recorded)
    if has_unnoticed_staleness(causes, stale=total.stale):
        whole = merge_backend_and_staleness(whole)
        by_step = {step: merge_backend_and_staleness(found) for step, found in by_step.items()}
        versions = [replace(version, backend=None) for version in versions]
    (reader, without_text), k3 = load_decoder(card), float(recorded[..., COLUMNS.index("total_k3")].sum())
    return Attribution(
        steps=list(by_step),
        rows=total.rows,
        left_out=left_out,
        whole=whole,
        by_step=by_step,
        versions=versions,
        profiles=buckets,
        tokens=build_examples(WorstToken, total.tokens, k3, reader),
        worst=build_examples(WorstRow, total.worst, k3, reader),
        without_text=without_text,
        causes=causes,
        mend_first=describe_faults(causes, stale=total.stale),
        searched=total.sample.tokens if sampled else 0,
    )


def _decompose_steps(parts: Iterable[tuple[int, Part]], by_step: dict[int, Decomposition]) -> Iterator[Part]:
    """Yield the parts, and record the decomposition of each step that contains any rows."""
    decomposer = StepDecomposer()
    for step, part in parts:
        if part.rows:
            by_step[step] = decomposer.decompose(part.sums)
        yield part
