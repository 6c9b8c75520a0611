"""Replay of all corrections over all chosen steps of a recording, with few steps in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...correction import CorrectionSpec, SpecError
from ...recording import Recording, RecordingError, Step
from ...recording.recording import join_alike, read_extensions
from ..jobs import ALONE, Jobs
from .candidates import Candidate
from .measures import (
    COLUMNS,
    FEW,
    GROUPS,
    Agreement,
    CorrectionMeasures,
    TurnShare,
    build_reference_block,
    compare_pairs,
    compute_agreement,
    compute_measures,
    compute_row_sums,
    compute_turn_shares,
    sum_by_group,
    weigh_advantages,
)
from .replay import (
    Array,
    Block,
    Decision,
    RecordedLoss,
    check_replayable,
    compute_constants,
    count_kept,
    decide,
    iterate_blocks,
    needs_other_advantages,
)

TOLERANCE = 1e-5
"""Relative tolerance when weights are compared. Weights are float32, exponentiated on the run's own device."""


@dataclass(frozen=True)
class Fidelity:
    """Comparison of a replay of the recorded correction with the recorded decisions.

    Attributes:
        tokens: number of compared response tokens, whose mu and pi_old are finite; a correction does not act on other
            tokens.
        weights: number of compared tokens whose weight differs by more than ``TOLERANCE``.
        rejections: number of compared tokens for which the rejecting parts differ from the record; decisions must match
            exactly.
        weight_error: largest relative difference of a weight.
    """

    tokens: int = 0
    weights: int = 0
    rejections: int = 0
    weight_error: float = 0.0

    @property
    def agrees(self) -> bool:
        return not (self.weights or self.rejections)

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.tokens + other.tokens,
            self.weights + other.weights,
            self.rejections + other.rejections,
            max(self.weight_error, other.weight_error),
        )


def compare_with_record(by: Decision, of: Block, reasons: Sequence[str]) -> Fidelity:
    """Compare one block.

    Args:
        by: the recorded correction's decision in the replay.
        reasons: names of the bits of ``rejected_by``.
    """
    # Rebuild the recorded bit field, with one bit per reason.
    replayed = torch.zeros_like(of.rejected_by)
    for bit, reason in enumerate(reasons):
        if (drop := by.rejected.get(reason)) is not None:
            replayed |= (drop & by.valid).int() << bit
    other = of.mask & (replayed != of.rejected_by)
    # Rejections by a part that the record does not name are included as well.
    other |= of.mask & by.valid & ((of.rejected_by == 0) != by.keep)
    # Weights have no effect outside the valid tokens.
    error = ((by.weight - of.weight).abs() / of.weight.abs().clamp(min=1e-30)).nan_to_num(torch.inf)
    error = torch.where(by.valid & (by.weight != of.weight), error, 0.0)
    return Fidelity(
        tokens=int((of.mask & by.valid).sum()),
        weights=int((error > TOLERANCE).sum()),
        rejections=int(other.sum()),
        weight_error=float(error.max()) if error.numel() else 0.0,
    )


@dataclass(frozen=True)
class CorrectionOutcome:
    """Effect of one correction on the recorded steps.

    Attributes:
        candidate: the correction.
        overall: measures over all rows.
        groups: measures by ``length/<bucket>``, ``advantage/<sign>``, ``staleness/<group>``, for groups with a row.
        turns: shares by ``turn/<number>``, for turns with a token.
        steps: step -> measures over that step.
    """

    candidate: Candidate
    overall: CorrectionMeasures
    groups: Mapping[str, CorrectionMeasures]
    turns: Mapping[str, TurnShare]
    steps: Mapping[int, CorrectionMeasures]


@dataclass(frozen=True)
class Study:
    """The result of a replay.

    Attributes:
        directory: directory of the recording.
        steps: the replayed steps.
        rows, tokens: number of rows with a response token, and number of response tokens, in these steps.
        outcomes: the outcome of each correction that could be replayed.
        failures: label -> why the correction could not be replayed.
        agreement: agreement between ``outcomes``, in their order.
        fidelity: comparison of the recorded correction's replay with the record.
        notes: limitations of the figures, one sentence each.
    """

    directory: str
    steps: tuple[int, ...]
    rows: int
    tokens: int
    outcomes: tuple[CorrectionOutcome, ...]
    failures: Mapping[str, str]
    agreement: Agreement
    fidelity: Fidelity
    notes: tuple[str, ...]


@dataclass
class _Totals:
    """Sums over the replayed steps, and counts for notes on the limitations of the figures.

    Attributes:
        pairs: (3, S, S) sums of ``compare_pairs`` for all S corrections.
        sums: index of a correction -> (G, L, len(COLUMNS)) sums over its rows.
        by_step: step -> index of a correction -> (L, len(COLUMNS)) sums over its rows in that step. A step without rows
            is missing.
        failures: label -> why a correction could not be replayed.
        uncounted: number of response tokens whose gradient weights are excluded.
        unchecked: whether the recorded correction was not compared with its replay at some step.
        unscaled: setting and reason -> the steps at which the setting had no effect.
        other_advantages: labels of corrections with which training would have used other advantages.
        needs_batch: whether some correction uses a constant of the whole batch.
    """

    pairs: Array
    sums: dict[int, Array] = field(default_factory=dict)
    by_step: dict[int, dict[int, Array]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    fidelity: Fidelity = field(default_factory=Fidelity)
    rows: int = 0
    tokens: int = 0
    uncounted: int = 0
    unchecked: bool = False
    unscaled: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    other_advantages: set[str] = field(default_factory=set)
    needs_batch: bool = False

    def add(self, other: _Totals) -> None:
        """Add the totals of a later step."""
        self.pairs += other.pairs
        for place, sums in other.sums.items():
            self.sums[place] = sums + self.sums.get(place, 0.0)
        self.by_step |= other.by_step
        self.failures = other.failures | self.failures  # name the first step at which a correction fails
        for name in ("rows", "tokens", "uncounted", "fidelity"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unchecked |= other.unchecked
        for key, steps in other.unscaled.items():
            self.unscaled.setdefault(key, set()).update(steps)
        self.other_advantages |= other.other_advantages
        self.needs_batch |= other.needs_batch

    def build_outcome(self, place: int, candidate: Candidate) -> CorrectionOutcome:
        """Build the outcome of a correction that was replayed at every step."""
        total = self.sums[place]
        overall, *groups = map(compute_measures, total)
        return CorrectionOutcome(
            candidate,
            overall,
            {name: group for name, group in zip(GROUPS[1:], groups, strict=True) if group.rows},
            compute_turn_shares(total[0]),
            {step: compute_measures(sums[place]) for step, sums in self.by_step.items()},
        )


@torch.no_grad()
def run_study(
    recording: Recording,
    steps: Sequence[int],
    candidates: Sequence[Candidate],
    jobs: Jobs = ALONE,
) -> Study:
    """Replay ``candidates`` over ``steps``, and compare the replay of the recorded correction with the recording.

    Args:
        jobs: the processes that replay the steps.

    Raises:
        RecordingError: a step is damaged, or no step contains a row; single steps without rows are skipped.
    """
    replayable = [candidate for candidate in candidates if candidate.error is None]
    card = recording.card
    loss = RecordedLoss.from_card(card)
    totals = _Totals(np.zeros((3, len(replayable), len(replayable))))
    totals.failures = {candidate.label: candidate.error for candidate in candidates if candidate.error is not None}
    for found in jobs.map(
        partial(_replay_step, replayable, loss), [recording.only(step) for step in steps], "replaying"
    ):
        totals.add(found)
    if not totals.by_step:
        span = f"steps {steps[0]} to {steps[-1]}"
        raise RecordingError(f"{recording.directory}: no row is recorded in {span}. Record other steps.")
    done = [place for place, candidate in enumerate(replayable) if candidate.label not in totals.failures]
    outcomes = tuple(totals.build_outcome(place, replayable[place]) for place in done)
    extensions = read_extensions(card).items()
    return Study(
        directory=str(recording.directory),
        steps=tuple(totals.by_step),
        rows=totals.rows,
        tokens=totals.tokens,
        outcomes=outcomes,
        failures=totals.failures,
        agreement=compute_agreement(totals.pairs[np.ix_(range(3), done, done)]),
        fidelity=totals.fidelity,
        notes=(
            *filter(None, [loss.note]),
            *(f"{section}: {each['replay']}" for section, each in extensions if each["replay"]),
            *_format_notes(totals, [outcome.overall for outcome in outcomes], sampled=loss.sampled),
        ),
    )


_NAMED = 5
"""Largest number of corrections that a note names."""


def _format_notes(totals: _Totals, measures: Sequence[CorrectionMeasures], *, sampled: bool) -> Iterator[str]:
    """Yield sentences about the limitations of the figures, one at a time."""
    if totals.uncounted:
        yield f"{totals.uncounted} response tokens are excluded, because their log-prob or advantage is not finite."
    if sampled and totals.needs_batch:
        yield "Only a sample of the rows was recorded, so constants of the whole batch are computed from the sample."
    for (asked, reason), steps in totals.unscaled.items():
        yield (
            f"{asked} is replayed with the original denominator at {len(steps)} step(s), because its factor is "
            f"unknown: {reason}."
        )
    # A correction may fail after an earlier step has added a note about it.
    if labels := sorted(totals.other_advantages - totals.failures.keys()):
        more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
        yield (
            f"correction.baseline=exclude computes advantages from kept rows, but they are used as recorded: with "
            f"{', '.join(labels[:_NAMED])}{more}, training would have used other advantages."
        )
    if totals.unchecked:
        yield "For the same reason, the recorded correction was not compared with its replay."
    elif not totals.fidelity.tokens:
        yield "No token has a finite mu and pi_old."
    # The reference is the same for all corrections.
    if measures and measures[0].rows and measures[0].reference_rows < FEW:
        yield (
            f"No bias by sequence is shown: when weighted by pi / mu of the whole row, {measures[0].rows} rows count "
            f"as only {measures[0].reference_rows:.1f}, which is too few for a reference."
        )


@torch.no_grad()
def _replay_step(candidates: Sequence[Candidate], loss: RecordedLoss, recording: Recording) -> _Totals:
    totals = _Totals(np.zeros((3, len(candidates), len(candidates))))
    # A constant of the whole batch can only be computed from all rows of the step; all other results can be added up.
    for part in join_alike(recording.in_pieces(), partial(_needs_batch, candidates)):
        if len(part.rows):
            _replay(part, recording, candidates, loss, totals)
    return totals


def _needs_batch(candidates: Sequence[Candidate], part: Step) -> bool:
    """Check whether a correction, or the one that was active, uses a constant of the whole batch."""
    for resolve in (CorrectionSpec.from_mapping, *(candidate.resolve_spec for candidate in candidates)):
        with contextlib.suppress(SpecError):  # reported when the correction is replayed
            spec = resolve(part.spec)
            if spec.needs_constants or spec.recounts:
                return True
    return False


def _replay(
    part: Step, recording: Recording, candidates: Sequence[Candidate], loss: RecordedLoss, totals: _Totals
) -> None:
    """Replay every correction on rows of one step, and add the results to ``totals``."""
    ((number, files),) = recording.files.items()
    rows = part.rows
    try:
        recorded = CorrectionSpec.from_mapping(part.spec)
    except SpecError as error:
        why = f"its metadata contains no valid correction ({error})"
        raise RecordingError(f"{files[0]}: {why}. Remove the file.") from error
    active: dict[int, CorrectionSpec] = {}
    for place, candidate in enumerate(candidates):
        if candidate.label in totals.failures:
            continue
        try:
            spec = candidate.resolve_spec(part.spec)
            if spec.centering is not None:
                why = (
                    "the log-probs of tokens that were not sampled are unknown. Replay with correction.centering=null."
                )
                raise SpecError(f"correction.centering={spec.centering}: {why}")
            check_replayable(spec, recorded, rows)
            active[place] = spec
        except SpecError as error:
            totals.failures[candidate.label] = f"step {number}: {error}"
    # Results are keyed by spec, so that candidates that are equal at this step are replayed once.
    replayed = list(dict.fromkeys(active.values()))
    constants = {spec: compute_constants(spec, recorded, rows) for spec in [recorded, *replayed]}
    totals.needs_batch |= any(spec.needs_constants for spec in constants)
    totals.other_advantages |= {
        candidates[place].label for place, spec in active.items() if needs_other_advantages(spec, recorded)
    }
    recounting = [spec for spec in replayed if spec.recounts]
    unknown = loss.explain_unknown(rows) if recounting else ""
    # Specs with an unknown scale are replayed with the original denominator.
    scales: dict[CorrectionSpec, Array] = {}
    for spec in recounting:
        if unknown:
            asked = "denominator=kept" if spec.denominator == "kept" else "nonfinite=excluded"
            totals.unscaled.setdefault((asked, unknown), set()).add(number)
        else:
            scales[spec] = loss.compute_scale(rows, count_kept(spec, recorded, rows, constants[spec]))
    tables = {spec: np.zeros((len(rows), len(COLUMNS))) for spec in replayed}
    places = list(active)
    for block in iterate_blocks(rows):
        of = build_reference_block(block, loss)
        decisions = {spec: decide(spec, recorded, block, constants[spec]) for spec in constants}
        weighed = {}
        for spec, table in tables.items():
            weighed[spec] = weigh_advantages(spec, decisions[spec], of, scales.get(spec))
            table[block.rows] = compute_row_sums(decisions[spec], of, weighed[spec])
        if places:
            chosen = active.values()
            pairs = compare_pairs([decisions[spec].keep for spec in chosen], [weighed[s] for s in chosen], of.counted)
            totals.pairs[np.ix_(range(3), places, places)] += pairs
        totals.rows += int(block.mask.any(-1).sum())
        totals.tokens += int(block.mask.sum())
        totals.uncounted += int((block.mask & ~of.counted).sum())
        # The constants of the whole batch cannot be computed from a recorded sample.
        if loss.sampled and recorded.needs_constants:
            totals.unchecked = True
        else:
            totals.fidelity += compare_with_record(decisions[recorded], block, part.reasons)
    sums = dict(zip(tables, sum_by_group(rows, tables.values()), strict=True))
    of_step = totals.by_step.setdefault(number, {})
    for place, spec in active.items():
        totals.sums[place] = sums[spec] + totals.sums.get(place, 0.0)
        of_step[place] = sums[spec][0] + of_step.get(place, 0.0)
