"""Replay of all corrections over all chosen steps of a recording, with few steps in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_patches.releases import attributes_of

from ...correction import CorrectionSpec, SpecError
from ...correction.denominator import HAS_DENOMINATOR, compute_scale_of_counts
from ...recording import Recording, RecordingError, Rows, Step
from ...recording.recording import join_alike, read_config, read_extensions
from ..jobs import ALONE, Jobs, show_progress
from .candidates import Candidate
from .gradient_sums import (
    COLUMNS,
    BaseLoss,
    ReferenceBlock,
    build_grouping,
    build_reference_block,
    compute_gradient_weight,
    compute_pull,
    compute_row_sums,
)
from .outcomes import (
    FEW,
    AgreementCounter,
    CorrectionOutcome,
    Fidelity,
    RunningOutcome,
    Study,
    Sums,
    compare_with_record,
)
from .replay import (
    SIZE,
    check_gradient_known,
    check_replayable,
    compute_constants,
    count_kept_tokens,
    decide,
    iterate_blocks,
    needs_other_advantages,
)


@dataclass(frozen=True)
class DenominatorCounts:
    """Settings, read from a run's card, that determine the denominator of the run's loss.

    Attributes:
        mode: the aggregation of the policy loss, from ``actor.loss_agg_mode``; None if the card does not contain it.
        mini_batch_rows: rows of a mini-batch over all ranks; None if unknown.
        sampled: whether only a share of the rows was recorded.
    """

    mode: str | None = None
    mini_batch_rows: int | None = None
    sampled: bool = False

    @classmethod
    def from_card(cls, card: Mapping[str, Any], *, sampled: bool) -> DenominatorCounts:
        """Read the settings from a recording's card; mini-batches are split as in ``batch.plan``."""
        mode = read_config(card, "actor_rollout_ref.actor.loss_agg_mode")
        prompts = read_config(card, "actor_rollout_ref.actor.ppo_mini_batch_size")
        responses = read_config(card, "actor_rollout_ref.rollout.n")
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (prompts, responses))
        if isinstance(mode, str) and isinstance(release := card.get("release"), str):
            loss_mode = str(read_config(card, "actor_rollout_ref.actor.policy_loss.loss_mode"))
            mode = attributes_of(release).find_policy_aggregation(loss_mode, mode)
        return cls(mode if isinstance(mode, str) else None, prompts * responses if whole else None, sampled)

    def explain_unknown(self, rows: Rows) -> str:
        """Explain why N and R of the mini-batches of ``rows`` are unknown; empty if they are known.

        Args:
            rows: all recorded rows of one step's updates under one correction.
        """
        if self.sampled:
            return "only a sample of the rows was recorded"
        if self.mode is None or self.mini_batch_rows is None:
            return "the recording does not contain all of loss_agg_mode, ppo_mini_batch_size and rollout.n"
        if self.mode not in HAS_DENOMINATOR:
            return f"loss_agg_mode={self.mode} divides by an unknown count"
        _, counts = np.unique(rows.mini_batch, return_counts=True)
        if (rows.mini_batch < 0).any() or (counts != self.mini_batch_rows).any():
            return (
                f"some recorded mini-batches do not have the {self.mini_batch_rows} rows that the run trains on at once"
            )
        return ""

    def compute_scale(self, rows: Rows, kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the factor of each row, (N,) float64; see ``correction.denominator.compute_scale_of_counts``.

        Args:
            rows: rows for which ``explain_unknown`` is empty.
            kept: (N,) number of response tokens that the correction keeps in each row.
        """
        assert self.mode is not None, "explain_unknown is empty"
        assert self.mini_batch_rows is not None, "explain_unknown is empty"
        _, mini_batch = np.unique(rows.mini_batch, return_inverse=True)
        return compute_scale_of_counts(
            self.mode,
            tokens=torch.from_numpy(rows.length.astype(np.float64)),
            kept=torch.from_numpy(kept),
            mini_batch=torch.from_numpy(mini_batch.astype(np.int64)),
            mini_batch_rows=self.mini_batch_rows,
        ).numpy()


_NAMED = 5
"""Largest number of corrections that a note names."""


@dataclass
class _ReplayNotes:
    """Counts that are collected during the replay, for notes on the limitations of the figures."""

    fidelity: Fidelity = field(default_factory=Fidelity)
    rows: int = 0
    tokens: int = 0
    uncounted: int = 0
    unchecked: int = 0
    unscaled: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    other_advantages: set[str] = field(default_factory=set)

    def add_block(self, of: ReferenceBlock) -> None:
        """Count the rows and tokens of a block."""
        counted = of.counted.bool()
        self.rows += int(of.block.mask.any(-1).sum())
        self.tokens += int(of.block.mask.sum())
        self.uncounted += int((of.block.mask & ~counted).sum())

    def add(self, other: _ReplayNotes) -> None:
        """Add the counts of other steps."""
        self.fidelity += other.fidelity
        for name in ("rows", "tokens", "uncounted", "unchecked"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, steps in other.unscaled.items():
            self.unscaled.setdefault(key, set()).update(steps)
        self.other_advantages |= other.other_advantages

    def format_notes(self, *, sampled: bool, needs_batch: bool) -> Iterator[str]:
        """Yield sentences about the limitations of the figures, one at a time."""
        if self.uncounted:
            yield (
                f"{self.uncounted} response tokens have a log-prob or an advantage that is not finite: their gradient "
                f"weights are left out."
            )
        if sampled and needs_batch:
            yield (
                "Only a sample of the rows was recorded: constants of the whole batch (the mean of normalised weights, "
                "M2PO's cut) are computed from the sample."
            )
        for (asked, reason), steps in self.unscaled.items():
            yield (
                f"{asked} is replayed as original in {len(steps)} step(s), because its factor N / (N - R) is unknown: "
                f"{reason}."
            )
        if labels := sorted(self.other_advantages):
            more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
            yield (
                f"Advantages are used as recorded, but correction.baseline=exclude computes them from kept rows: with "
                f"{', '.join(labels[:_NAMED])}{more}, training would have used other advantages."
            )
        if self.unchecked:
            yield "The recorded correction was not compared with its replay, for the same reason."
        elif not self.fidelity.tokens:
            yield "No token has a finite mu and pi_old."


@dataclass
class _StepReplay:
    """Contribution of one step to the result of a replay.

    Attributes:
        sums: index of a correction -> names of its groups and their sums, for each correction that acted in the step.
        failures: label -> why a correction could not be replayed.
        tally, seen: the counts for this step alone.
        needs_batch: whether some correction uses a constant of the whole batch.
        filled: whether the step contains any rows.
    """

    tally: AgreementCounter
    sums: list[tuple[int, tuple[str, ...], Sums]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    seen: _ReplayNotes = field(default_factory=_ReplayNotes)
    needs_batch: bool = False
    filled: bool = False


@torch.no_grad()
def run_study(
    recording: Recording,
    steps: Sequence[int],
    candidates: Sequence[Candidate],
    *,
    size: int = SIZE,
    jobs: Jobs = ALONE,
) -> Study:
    """Replay ``candidates`` over ``steps``, and compare the replay of the recorded correction with the recording.

    Args:
        size: positions in a padded block, see ``iterate_blocks``.
        jobs: the processes that replay the steps.

    Raises:
        RecordingError: a step is damaged, no step was chosen, or no step contains a row; single steps without rows are
            skipped.
    """
    if not steps:
        raise RecordingError(f"{recording.directory}: no step to replay.")
    failures = {candidate.label: candidate.error for candidate in candidates if candidate.error is not None}
    replayable = tuple(candidate for candidate in candidates if candidate.error is None)
    running = [RunningOutcome(candidate) for candidate in replayable]
    tally, seen, needs_batch, filled = AgreementCounter(len(running)), _ReplayNotes(), False, []
    card = recording.card
    base_loss, sampled = BaseLoss.from_card(card), read_recorded_share(card) < 1
    counts = DenominatorCounts.from_card(card, sampled=sampled)
    work = partial(_replay_step, replayable, _Setting(base_loss, counts, size, sampled))
    found = jobs.map(work, [recording.only(step) for step in steps])
    for number, step in zip(steps, show_progress(found, len(steps), "replaying"), strict=True):
        for place, names, sums in step.sums:
            running[place].add(number, names, sums)
        failures = step.failures | failures  # name the first step at which a correction fails
        tally.add_counts(step.tally)
        seen.add(step.seen)
        needs_batch = needs_batch or step.needs_batch
        filled += [number] if step.filled else []
    if not filled:
        raise RecordingError(
            f"{recording.directory}: no row is recorded in steps {steps[0]} to {steps[-1]}. Record other steps."
        )
    # A correction may fail after an earlier step has added a note about it.
    seen.other_advantages -= failures.keys()
    done = [place for place, one in enumerate(running) if one.candidate.label not in failures]
    outcomes = tuple(running[place].build_outcome() for place in done)
    return Study(
        directory=str(recording.directory),
        steps=tuple(filled),
        rows=seen.rows,
        tokens=seen.tokens,
        outcomes=outcomes,
        failures=failures,
        agreement=tally.compute_agreement(done),
        fidelity=seen.fidelity,
        notes=(
            *([base_loss.note] if base_loss.note else []),
            *_of_extensions(recording),
            *seen.format_notes(sampled=sampled, needs_batch=needs_batch),
            *_few_rows(outcomes),
        ),
    )


@dataclass(frozen=True)
class _Setting:
    """Settings that all steps share: base loss, denominator, block size in positions, and whether rows are a sample."""

    base_loss: BaseLoss
    counts: DenominatorCounts
    size: int
    sampled: bool


@torch.no_grad()
def _replay_step(candidates: Sequence[Candidate], setting: _Setting, recording: Recording) -> _StepReplay:
    (number,) = recording.steps
    found = _StepReplay(AgreementCounter(len(candidates)))
    # A constant of the whole batch can only be computed from all rows of the step; all other results can be added up.
    for part in join_alike(recording.in_pieces(), partial(_needs_batch, candidates)):
        if not len(part.rows):
            continue
        found.filled = True
        specs = _specs(recording, number, part, candidates, found.failures)
        found.needs_batch = found.needs_batch or any(spec.needs_constants for spec in specs.all)
        found.seen.other_advantages |= {
            candidates[place].label
            for place, spec in specs.active.items()
            if needs_other_advantages(spec, specs.recorded)
        }
        _replay(part, number, specs, found, setting)
    return found


def _needs_batch(candidates: Sequence[Candidate], part: Step) -> bool:
    """Check whether a correction, or the one that was active, uses a constant of the whole batch."""
    for resolve in (CorrectionSpec.from_mapping, *(candidate.resolve_spec for candidate in candidates)):
        with contextlib.suppress(SpecError):  # reported when the correction is replayed
            spec = resolve(part.spec)
            if spec.needs_constants or spec.recounts:
                return True
    return False


def _of_extensions(recording: Recording) -> Iterator[str]:
    """Yield the effects of the run's extensions on its replay."""
    for section, each in read_extensions(recording.card).items():
        if each["replay"]:
            yield f"{section}: {each['replay']}"


@dataclass(frozen=True)
class _Specs:
    """The corrections of one step.

    Attributes:
        recorded: the correction that acted.
        active: index of each correction that has not failed -> its spec.
    """

    recorded: CorrectionSpec
    active: dict[int, CorrectionSpec]

    @property
    def all(self) -> list[CorrectionSpec]:
        """All corrections, each once."""
        return list(dict.fromkeys([self.recorded, *self.active.values()]))


def _specs(
    recording: Recording, number: int, step: Step, candidates: Sequence[Candidate], failures: dict[str, str]
) -> _Specs:
    try:
        recorded = CorrectionSpec.from_mapping(step.spec)
    except SpecError as error:
        raise RecordingError(
            f"{recording.files[number][0]}: its metadata holds no valid correction ({error}). Remove the file."
        ) from error
    active = {}
    for place, candidate in enumerate(candidates):
        if candidate.label in failures:
            continue
        try:
            spec = candidate.resolve_spec(step.spec)
            check_gradient_known(spec)
            check_replayable(spec, recorded, step.rows)
            active[place] = spec
        except SpecError as error:
            failures[candidate.label] = f"step {number}: {error}"
    return _Specs(recorded, active)


def _replay(step: Step, number: int, specs: _Specs, found: _StepReplay, setting: _Setting) -> None:
    """Replay every correction on one step."""
    rows = step.rows
    constants = {spec: compute_constants(spec, specs.recorded, rows) for spec in specs.all}
    # Specs with an unknown scale are missing here; they are replayed with the original denominator.
    scales = {}
    if by_kept := [spec for spec in set(specs.active.values()) if spec.recounts]:
        if unknown := setting.counts.explain_unknown(rows):
            for spec in by_kept:
                asked = "denominator=kept" if spec.denominator == "kept" else "nonfinite=excluded"
                found.seen.unscaled.setdefault((asked, unknown), set()).add(number)
        else:
            for spec in by_kept:
                scales[spec] = setting.counts.compute_scale(
                    rows, count_kept_tokens(spec, specs.recorded, rows, constants[spec], setting.size)
                )
    # Results are keyed by spec, so that candidates that are equal at this step are replayed once.
    tables = {spec: np.zeros((len(rows), len(COLUMNS))) for spec in specs.active.values()}
    for block in iterate_blocks(rows, setting.size):
        of = build_reference_block(block, setting.base_loss)
        decisions = {spec: decide(spec, specs.recorded, block, constants[spec]) for spec in specs.all}
        weighed = {}
        for spec, table in tables.items():
            weighed[spec] = compute_gradient_weight(spec, decisions[spec], of, scales.get(spec)) * of.advantages
            if spec.penalty is not None:
                weighed[spec] = weighed[spec] - compute_pull(spec, decisions[spec], of, scales.get(spec))
            table[block.rows] = compute_row_sums(decisions[spec], of, weighed[spec])
        chosen = list(specs.active.values())
        found.tally.add(
            list(specs.active),
            [decisions[spec].keep for spec in chosen],
            [weighed[spec] for spec in chosen],
            of.counted.bool(),
        )
        found.seen.add_block(of)
        # The constants of the whole batch cannot be computed from a recorded sample.
        known = not (setting.sampled and specs.recorded.needs_constants)
        if known:
            found.seen.fidelity += compare_with_record(decisions[specs.recorded], block, step.reasons)
        else:
            found.seen.unchecked += 1
    groups = build_grouping(rows)
    sums = {spec: groups.sum_rows(table) for spec, table in tables.items()}
    for place, spec in specs.active.items():
        found.sums.append((place, groups.names, sums[spec]))


def _few_rows(outcomes: Sequence[CorrectionOutcome]) -> Iterator[str]:
    for outcome in outcomes[:1]:  # the reference is the same for all corrections
        overall = outcome.overall
        if overall.rows and overall.reference_rows < FEW:
            yield (
                f"No bias by sequence is shown: when weighted by pi / mu of the whole row, {overall.rows} rows count "
                f"as only {overall.reference_rows:.1f}, which is too few for a reference."
            )


def read_recorded_share(card: Mapping[str, Any]) -> float:
    """Read the share of rows that was recorded, ``offpolicy.record.share``; 1 if the card does not contain it."""
    share = read_config(card, "offpolicy.record.share")
    return float(share) if isinstance(share, int | float) and not isinstance(share, bool) else 1.0
