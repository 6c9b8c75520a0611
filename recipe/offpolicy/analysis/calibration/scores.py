"""Values that masks and weights compare with their bounds, for each unit, from a sample of a recording's prompts.

Rows of one prompt are dependent, so they are sampled together, which keeps the intervals of a calibration valid. A
prompt is drawn by a hash of its name, independent of the process and of the order of reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...correction import CorrectionSpec, MaskSpec, SpecError
from ...correction.masks import compute_extremes
from ...correction.ratios import compute_log_ratio, find_valid_tokens
from ...correction.units import find_applicable, partition_units
from ...correction.weights import compute_log_weight
from ...recording import Recording, RecordingError, Rows, Step
from ...recording.recording import get_trainers_pi_old
from ..attribution.recorded_tokens import BYTES_A_TOKEN
from ..jobs import ALONE, Jobs, map_steps
from ..whatif.replay import Block, check_replayable, compute_pi_old, iterate_blocks
from .parts import BoundedPart

TOKENS: Final = 4_000_000
"""Number of tokens (estimated from file sizes) up to which all rows are used; larger recordings are sampled down to
about this number."""
ROWS: Final = 400_000
"""Number of rows in the sample of a larger recording, for parts that decide by row. With eight rows per prompt, a kept
share of 0.98 then has a standard error of 0.0006, even if all eight rows are alike."""


@dataclass(frozen=True)
class PromptSample:
    """Fractions of the prompts to keep, each prompt with all its units; the smaller sample is part of the larger one.

    Attributes:
        tokens: share for parts that decide by token, turn or version.
        rows: share for parts that decide by row.
    """

    tokens: float = 1.0
    rows: float = 1.0

    @classmethod
    def of_recording(cls, recording: Recording) -> PromptSample:
        """Choose the fractions that keep about ``TOKENS`` and ``ROWS``."""
        tokens = sum(path.stat().st_size for files in recording.files.values() for path in files) / BYTES_A_TOKEN
        if tokens <= TOKENS:
            return EVERY_PROMPT
        return cls(TOKENS / tokens, min(1.0, ROWS / recording.count_rows()))

    @property
    def sentence(self) -> str:
        """The sentence that describes the sample; empty if all rows are used."""
        if self == EVERY_PROMPT:
            return ""
        by_row = f"{self.rows:.2g}" if self.rows < 1 else "all"
        return (
            f"Bounds are based on a sample of the prompts: a share of {self.tokens:.2g} for parts that decide by "
            f"token, and {by_row} for parts that decide by row. The shares that the whole correction keeps are "
            "computed over all tokens."
        )

    def find_rows(self, prompt: NDArray[np.uint64], share: float | None = None) -> NDArray[np.bool_]:
        """Find the rows that belong to this share of the prompts (default: the largest share): (N,) bool.

        Args:
            prompt: (N,) of ``hash_prompts``.
        """
        share = max(self.tokens, self.rows) if share is None else share
        return (prompt / 2.0**64 < share) | (share >= 1)  # a hash near 2^64 is rounded to 2^64


EVERY_PROMPT: Final = PromptSample()


def hash_prompts(rows: Rows) -> NDArray[np.uint64]:
    """Hash the name of the prompt of each row, (N,); a row without a name counts as a separate prompt."""
    hashes: dict[str, int] = {}
    found = np.empty(len(rows), dtype=np.uint64)
    places = zip(rows.step, rows.rank, rows.mini_batch, strict=True)
    for index, (place, uid) in enumerate(zip(places, rows.uid, strict=True)):
        # A uid cannot contain NUL, so a made-up name cannot collide with a uid.
        name = str(uid) or "\0" + "/".join(map(str, (*place, index)))
        if name not in hashes:
            hashes[name] = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        found[index] = hashes[name]
    return found


def number_prompts(prompt: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Number prompts in the order of their first occurrence, from 0: (N,)."""
    _, first, place = np.unique(prompt, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[place]


Arrays = TypeVar("Arrays", "Scores", "RowState")


@dataclass(frozen=True)
class Scores:
    """Units that one part compares with its bounds, in recorded order.

    Attributes:
        low, high: (U,) float64, smallest and largest value that the part compares, in the precision of the comparison:
            in nats for ratios, divided by the factor of the unit's age if bounds depend on age. The two differ if every
            token of a unit must lie inside the bounds.
        looked: (U,) bool, whether the part applies to the unit; see ``MaskSpec.when``.
        tokens: (U,) int64, number of valid tokens of the unit.
        length: (U,) int64, T, the number of valid tokens of the row to which the unit belongs.
        row: (U,) int64, number of that row, over all steps.
        group: (U,) int64, number of the row's prompt; rows with the same uid belong to one prompt, and a row without a
            uid forms its own group.
    """

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    looked: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    length: NDArray[np.int64]
    row: NDArray[np.int64]
    group: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.low)

    def select(self, units: NDArray[np.bool_]) -> Scores:
        """Return only these units: (U,) bool."""
        return Scores(**{f.name: getattr(self, f.name)[units] for f in fields(self)})

    def find_outside(self, limits: tuple[float, float], *, exact: bool = False) -> NDArray[np.bool_]:
        """Find the units that bounds at ``limits`` drop, (U,) bool; compared in float32 unless ``exact`` is set."""
        lower, upper = limits if exact else (float(np.float32(limit)) for limit in limits)
        return self.looked & ((self.low < lower) | (self.high > upper))


@dataclass(frozen=True)
class RowState:
    """Sampling state of the recorded rows, (N,) each.

    Attributes:
        mini_batch: number of the batch's gradient steps before the row was recorded.
        staleness: versions between the row's sampling and its use; -1 if unknown.
        apart: mean |log pi - log pi_old| over the row's valid tokens, in nats, with pi_old under the trainer's own
            weights; 0 if pi is used instead (see ``recording.recording``); NaN without valid tokens.
        grouped: whether the row's prompt is known.
        nonfinite: number of response tokens whose log pi is not finite although mu and pi_old are.
    """

    mini_batch: NDArray[np.int32]
    staleness: NDArray[np.int64]
    apart: NDArray[np.float64]
    grouped: NDArray[np.bool_]
    nonfinite: NDArray[np.int64]

    def select(self, rows: NDArray[np.int64]) -> RowState:
        """Return the state of only these rows."""
        return RowState(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class _StepScores:
    """Units of one step.

    Attributes:
        scores: key of a part -> its units, with rows numbered within the step, and groups not numbered yet.
        state, prompt: state and prompt of the numbered rows, (N,).
    """

    scores: dict[str, Scores]
    state: RowState
    prompt: NDArray[np.uint64]


def compute_scores(
    steps: Iterable[Step],
    spec: CorrectionSpec,
    parts: Sequence[BoundedPart],
    *,
    sample: PromptSample = EVERY_PROMPT,
    jobs: Jobs = ALONE,
) -> tuple[dict[str, Scores], RowState]:
    """Compute the units of each part of ``spec`` over all ``steps``, with one step or piece in memory at a time.

    Args:
        sample: sample of the prompts whose units are kept.
        jobs: the processes that read the steps of a recording.

    Returns:
        Key of the part -> its units, at least one; and the state of all rows, by their number. Tokens whose mu or
        pi_old is not finite have no unit. If the part compares pi, neither do tokens whose pi is not finite. Rows with
        only such tokens have no unit either.

    Raises:
        SpecError: the recording does not contain everything that ``spec`` needs.
        RecordingError: no response or no finite token is recorded, or a step's metadata does not contain a valid
            correction.
    """
    work = partial(_score_step, spec, parts, sample)
    # A budget is shared by the whole batch.
    whole = any(part.by_batch for part in parts)
    found = list(filter(None, map_steps(work, steps, jobs, "calibrating", in_pieces=not whole)))
    if not found:
        raise RecordingError("no response is recorded in any of these steps. Record other steps.")
    group = number_prompts(np.concatenate([step.prompt for step in found]))
    starts = np.cumsum([0, *(len(step.prompt) for step in found)])
    scores = {}
    for part in parts:
        # The units are popped, because the units of a large recording must not be in memory twice.
        pieces = [step.scores.pop(part.key) for step in found]
        rows = [piece.row + start for piece, start in zip(pieces, starts, strict=False)]
        row = np.concatenate(rows)
        scores[part.key] = replace(_joined(Scores, pieces), row=row, group=group[row])
        if not len(row):
            needs = "mu and pi_old" if part.spec.ratio == "rollout" else "mu, pi_old and pi"
            lacking = f"no token with a finite {needs} is recorded in"
            if sample != EVERY_PROMPT:
                few = f"{lacking} the sampled prompts, which are only a few of the recorded ones."
                raise RecordingError(f"{few} Calibrate on fewer files: move most of them to another directory.")
            raise RecordingError(f"{lacking} any of these steps. Record other steps.")
    return scores, _joined(RowState, [step.state for step in found])


def _score_step(
    spec: CorrectionSpec, parts: Sequence[BoundedPart], sample: PromptSample, steps: Iterable[Step]
) -> _StepScores | None:
    """Compute the units of a step, which is passed once for each active correction; None without rows."""
    pieces: dict[str, list[Scores]] = {part.key: [_NO_UNIT] for part in parts}
    states: list[RowState] = []
    prompts: list[NDArray[np.uint64]] = []
    for step in steps:
        if not len(step.rows):
            continue
        recorded = read_recorded_spec(step)
        check_replayable(spec, recorded, step.rows)
        prompt = hash_prompts(step.rows)
        kept = np.flatnonzero(sample.find_rows(prompt))
        # The number of each kept row among the step's rows.
        number = np.full(len(prompt), -1)
        number[kept] = sum(map(len, prompts)) + np.arange(len(kept))
        states.append(_state(step).select(kept))
        prompts.append(prompt[kept])
        for share in {sample.tokens, sample.rows}:
            of_share = [part for part in parts if share == (sample.rows if part.share_of == "rows" else sample.tokens)]
            for key, units in _score_rows(step.rows, spec, recorded, of_share, sample.find_rows(prompt, share)).items():
                pieces[key].append(replace(units, row=number[units.row]))
    if not states:
        return None
    joined = {key: _joined(Scores, of_part) for key, of_part in pieces.items()}
    return _StepScores(joined, _joined(RowState, states), np.concatenate(prompts))


def _score_rows(
    rows: Rows,
    spec: CorrectionSpec,
    recorded: CorrectionSpec,
    parts: Sequence[BoundedPart],
    kept: NDArray[np.bool_],
) -> dict[str, Scores]:
    """Compute the units of each part in the kept rows, (N,) bool, and the numbers of these rows."""
    # A budget is shared by the whole batch, including the rows that are not kept.
    chosen = np.arange(len(rows)) if any(part.by_batch for part in parts) else np.flatnonzero(kept)
    some = rows if len(chosen) == len(rows) else rows.take(chosen)
    pieces: dict[str, list[Scores]] = {part.key: [_NO_UNIT] for part in parts}
    for block in iterate_blocks(some) if parts else ():
        old = compute_pi_old(spec, recorded, block)
        for part in parts:
            pieces[part.key].append(_of_block(part, block, old))
    found = {}
    for part in parts:
        units = _joined(Scores, pieces[part.key])
        units = replace(_by_budget(units) if part.by_batch else units, row=chosen[units.row])
        found[part.key] = units.select(kept[units.row])
    return found


def read_recorded_spec(step: Step) -> CorrectionSpec:
    """Read the correction that was active at ``step`` from the step's metadata.

    Raises:
        RecordingError: the metadata of the step's file does not contain a valid correction.
    """
    try:
        return CorrectionSpec.from_mapping(step.spec)
    except SpecError as error:
        number = int(step.rows.step[0]) if len(step.rows) else "?"
        raise RecordingError(
            f"step {number}: the metadata of its file contains no valid correction: {error}"
        ) from error


def _of_block(part: BoundedPart, block: Block, old: Tensor) -> Scores:
    mu, pi = block.rollout_log_prob, block.log_prob
    # No bound can be derived from a ratio that is not finite; in training, such a pi stops the run.
    compared = (old, mu) if part.spec.ratio == "rollout" else (old, mu, pi)
    valid = find_valid_tokens(block.mask, *compared)
    log_rho, log_r = compute_log_ratio(old, mu, valid), compute_log_ratio(pi, old, valid)
    # The terms are added in the same order as in step_stage, so that both sums are the same float32.
    value, above, below = {
        "rollout": (log_rho, old, mu),
        "full": (log_rho + log_r, pi, mu),
        "ppo": (log_r, pi, old),
    }[part.spec.ratio]
    ids = {"turn": block.turn, "version": block.version}.get(part.spec.level)
    units = partition_units(part.spec.level, valid, ids, ages=block.staleness.double())
    if isinstance(part.spec, MaskSpec):
        low, high = compute_extremes(part.spec, units, value, numerator=above, denominator=below)
    else:
        low = high = compute_log_weight(part.spec, value, units)
    looked = find_applicable(part.spec, block.advantages, valid, log_ratio=value, turns=block.turn)
    if part.spec.by_staleness is not None:
        # A value is inside a bound times a factor if the value divided by the factor is inside the bound.
        factors = units.choose_by_age(part.spec.by_staleness, torch.float64)
        low, high = low / factors, high / factors
    if part.spec.by_position is not None:
        growth = units.tokens.clamp(min=1).pow(part.spec.by_position)
        low, high = low / growth, high / growth
    if part.share_of == "tokens":
        low, high = units.spread(low), units.spread(high)
        tokens, looked = valid.double(), looked.expand(valid.shape)
    else:
        tokens, looked = units.tokens, looked.expand(units.tokens.shape)
    # Padding and units without a valid token have no score.
    there = (tokens > 0).numpy()
    at, _ = np.nonzero(there)
    row = block.rows[at]
    return Scores(
        low=_flat(low, there, exact=part.by_batch),
        high=_flat(high, there, exact=part.by_batch),
        looked=looked.numpy()[there],
        tokens=tokens.numpy()[there].astype(np.int64),
        length=valid.sum(-1).numpy()[at].astype(np.int64),
        row=row,
        group=row,  # until all steps are read and prompts are numbered
    )


def _by_budget(tokens: Scores) -> Scores:
    """For ``second_moment``, compute the smallest budget that keeps each token of a batch.

    That budget is the mean of the squares up to the token's own square, in ascending order.

    Args:
        tokens: tokens of one batch, with (log r)^2 as their value.
    """
    ordered, inverse, counts = np.unique(tokens.low, return_inverse=True, return_counts=True)
    # Equal values are kept or dropped together, so each value is counted together with all equal values.
    budget = ((ordered * counts).cumsum() / counts.cumsum())[inverse]
    return replace(tokens, low=budget, high=budget)


def _flat(values: Tensor, there: NDArray[np.bool_], *, exact: bool) -> NDArray[np.float64]:
    """Select the values of existing units; they are rounded to float32, as in masks, unless ``exact`` is set."""
    return (values if exact else values.to(torch.float32)).numpy()[there].astype(np.float64)


def _state(step: Step) -> RowState:
    rows = step.rows
    with np.errstate(invalid="ignore"):
        apart = np.abs(rows.log_prob.astype(np.float64) - get_trainers_pi_old(step))
    valid = rows.response_mask & np.isfinite(apart)
    at = rows.row_of_token[valid]
    counts = np.bincount(at, minlength=len(rows))
    totals = np.bincount(at, weights=apart[valid], minlength=len(rows))
    mean = np.divide(totals, counts, out=np.full(len(rows), np.nan), where=counts > 0)
    grouped = np.array([bool(uid) for uid in rows.uid], dtype=bool)
    # Training would stop at such a pi. Here, these units are left out, so their number is reported.
    lost = rows.response_mask & np.isfinite(rows.rollout_log_prob) & np.isfinite(rows.old_log_prob)
    lost &= ~np.isfinite(rows.log_prob)
    nonfinite = np.bincount(rows.row_of_token[lost], minlength=len(rows))
    return RowState(rows.mini_batch, rows.staleness, mean, grouped, nonfinite)


_NO_UNIT = Scores(*(np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool)), *(np.zeros(0, dtype=np.int64),) * 4)


def _joined(kind: type[Arrays], pieces: Sequence[Arrays]) -> Arrays:
    return kind(**{f.name: np.concatenate([getattr(piece, f.name) for piece in pieces]) for f in fields(kind)})
