"""Statistics of a recording by step and by length, from the recorded columns, without a replay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...correction.ratios import EXP_CLAMP
from ...correction.statistics import BUCKETS
from ...recording import Rows, Step
from ...recording.recording import find_scored_rows, get_trainers_pi_old
from ..jobs import ALONE, Jobs, map_steps

Floats = NDArray[np.float64]
RIGHT = 1.0
"""Smallest reward with which an answer counts as correct."""


@dataclass(frozen=True)
class StepNumbers:
    """Statistics of one step; NaN for a missing value. pi_old is computed under the trainer's own weights; see
    ``recording.recording``.

    Attributes:
        rows, tokens: numbers of responses and of response tokens.
        unscored: number of responses whose pi_old is unknown.
        compared: number of response tokens whose mu is finite and whose pi_old is known and finite.
        reward: mean over rows whose reward is known.
        length: mean T.
        length_right, length_wrong: mean T of responses with a reward of at least 1, and of responses with a lower
            reward.
        kl: KL(mu, pi_old) by k3, in nats per token, over the ``compared`` tokens.
        kl_fresh, fresh_tokens: KL over tokens that fresh weights sampled (staleness 0 or unknown), and their number.
        copied: whether mu equals pi_old bit for bit at all ``compared`` tokens.
        drift: mean |log pi - log pi_old|, nats per token; NaN if a response is ``unscored``.
        staleness: mean over rows whose versions are known.
        kept_tokens, kept_rows: shares of tokens and rows that the recorded correction kept.
        ess: (sum w)^2 / (n sum w^2), where w is the recorded weight times keep.
        nonfinite: number of response tokens whose mu, pi_old or pi is not finite.
        extensions: column of an extension -> its mean over the response tokens at which the column is finite.
    """

    step: int
    rows: int
    tokens: int
    unscored: int
    compared: int
    reward: float
    length: float
    length_right: float
    length_wrong: float
    kl: float
    kl_fresh: float
    fresh_tokens: int
    copied: bool
    drift: float
    staleness: float
    kept_tokens: float
    kept_rows: float
    ess: float
    nonfinite: int
    extensions: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LengthBucket:
    """Statistics of the rows of one length bucket, over all steps.

    Attributes:
        rows: number of rows with a response token whose mu and pi_old are finite.
        kept_tokens, kept_rows: shares of tokens and rows that the recorded corrections kept.
    """

    bucket: str
    rows: int
    kept_tokens: float
    kept_rows: float


@dataclass(frozen=True)
class Timeline:
    """Statistics of a recording by step and by length.

    Attributes:
        reasons: the parts that rejected tokens -> the share of all response tokens that each rejected on its own.
        correction: plain values of the correction that acted at the last step.
        changed: steps whose correction differs from that of the step read before them.
    """

    steps: tuple[StepNumbers, ...]
    lengths: tuple[LengthBucket, ...]
    reasons: dict[str, float]
    correction: Mapping[str, Any]
    changed: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def rows(self) -> int:
        return sum(step.rows for step in self.steps)

    @property
    def is_stale(self) -> bool:
        """True if older weights sampled some rows."""
        return bool(np.nanmax(self.get_column("staleness"), initial=0.0) > 0)

    @property
    def extensions(self) -> list[str]:
        """Columns of extensions that occur in any step."""
        return list(dict.fromkeys(name for step in self.steps for name in step.extensions))

    def get_column(self, name: str) -> Floats:
        """Return the values of one field at all steps, (steps,)."""
        return np.array([getattr(step, name) for step in self.steps], dtype=np.float64)


@dataclass(frozen=True)
class Part:
    """The part of a timeline that one step contributes, or the step's updates under one correction."""

    numbers: StepNumbers
    lengths: Floats
    rejected: Mapping[str, int]
    correction: Mapping[str, Any]


def build_timeline(steps: Iterable[Step], jobs: Jobs = ALONE) -> Timeline:
    """Build the timeline, one step in memory at a time; a step without recorded rows is left out.

    Args:
        steps: a recording, or steps in memory.
        jobs: the processes that read the steps of a recording.
    """
    return merge_parts(chain.from_iterable(map_steps(summarize_steps, steps, jobs, "over time")))


def merge_parts(parts: Iterable[Part]) -> Timeline:
    """Merge the parts of all steps, in order, into a timeline."""
    numbers: list[StepNumbers] = []
    buckets = np.zeros((len(BUCKETS), 4))
    rejected: dict[str, int] = {}
    correction: Mapping[str, Any] = {}
    changed = []
    for part in parts:
        if numbers and part.correction != correction:
            changed.append(part.numbers.step)
        correction = part.correction
        numbers.append(part.numbers)
        buckets += part.lengths
        for reason, hit in part.rejected.items():
            rejected[reason] = rejected.get(reason, 0) + hit
    tokens = sum(each.tokens for each in numbers)
    reasons = {reason: count / tokens if tokens else math.nan for reason, count in rejected.items()}
    return Timeline(tuple(numbers), tuple(_buckets(buckets)), reasons, correction, tuple(changed))


def summarize_steps(steps: Iterable[Step]) -> list[Part]:
    """Summarize each step that has a response."""
    parts = []
    for step in steps:
        if len(step.rows):
            by_bit = ((step.rows.rejected_by >> np.uint32(bit)) & 1 for bit in range(len(step.reasons)))
            rejected = {reason: int(hit.sum()) for reason, hit in zip(step.reasons, by_bit, strict=True)}
            parts.append(Part(_of_step(step), _of_lengths(step.rows), rejected, step.spec))
    return parts


def _of_step(step: Step) -> StepNumbers:
    rows = step.rows
    mask = rows.response_mask
    old = get_trainers_pi_old(step).astype(np.float64)
    unscored = int((~find_scored_rows(step)).sum())
    with np.errstate(invalid="ignore"):
        # The correction compared mu with its own pi_old; the mismatch of the engines is measured with the trainer's
        # pi_old.
        log_rho = rows.old_log_prob.astype(np.float64) - rows.rollout_log_prob
        gap, moved = old - rows.rollout_log_prob, rows.log_prob - old
    valid = mask & np.isfinite(log_rho)
    finite = valid & np.isfinite(rows.log_prob)
    compared = mask & np.isfinite(gap)
    keep = valid & (rows.rejected_by == 0)
    of_row = rows.row_of_token
    with np.errstate(invalid="ignore"):
        k3 = np.expm1(np.clip(gap, -EXP_CLAMP, EXP_CLAMP)) - gap
    fresh = compared & (rows.token_staleness <= 0)
    applied = rows.weight[keep].astype(np.float64)
    has_tokens = np.bincount(of_row[mask], minlength=len(rows)) > 0
    kept_rows = np.bincount(of_row[keep], minlength=len(rows)) > 0
    square = float(applied @ applied)
    known = rows.staleness[rows.staleness >= 0]
    return StepNumbers(
        step=int(rows.step[0]),
        rows=len(rows),
        tokens=int(mask.sum()),
        unscored=unscored,
        compared=int(compared.sum()),
        reward=_mean(rows.reward[np.isfinite(rows.reward)]),
        length=_mean(rows.length[has_tokens]),
        length_right=_mean(rows.length[has_tokens & (rows.reward >= RIGHT)]),
        length_wrong=_mean(rows.length[has_tokens & (rows.reward < RIGHT)]),
        kl=_mean(k3[compared]),
        kl_fresh=_mean(k3[fresh]),
        fresh_tokens=int(fresh.sum()),
        copied=bool(compared.any() and (gap[compared] == 0).all()),
        drift=math.nan if unscored else _mean(np.abs(moved[finite])),
        staleness=_mean(known),
        kept_tokens=keep.sum() / mask.sum() if mask.any() else math.nan,
        kept_rows=kept_rows.sum() / has_tokens.sum() if has_tokens.any() else math.nan,
        ess=float(applied.sum()) ** 2 / (int(valid.sum()) * square) if square > 0 else math.nan,
        nonfinite=int((mask & ~finite).sum()),
        extensions={name: _mean(found[mask & np.isfinite(found)]) for name, found in rows.extensions.items()},
    )


def _of_lengths(rows: Rows) -> Floats:
    """Compute (buckets, 4): rows, response tokens, tokens kept, rows kept."""
    with np.errstate(invalid="ignore"):
        log_rho = rows.old_log_prob.astype(np.float64) - rows.rollout_log_prob
    valid = rows.response_mask & np.isfinite(log_rho)
    of_row = rows.row_of_token

    def by_row(tokens: NDArray[np.bool_]) -> Floats:
        return np.bincount(of_row[tokens], minlength=len(rows)).astype(np.float64)

    length = by_row(valid)
    there = length > 0
    kept = by_row(valid & (rows.rejected_by == 0))
    columns = np.stack(
        [
            there,
            by_row(rows.response_mask),
            kept,
            kept > 0,
        ],
        axis=-1,
    ).astype(np.float64)
    edges = [most for most in BUCKETS.values() if most is not None]
    sums = np.zeros((len(BUCKETS), columns.shape[1]))
    # ``add.at`` adds up all rows of a bucket, whereas an indexed += would keep only the last row.
    np.add.at(sums, np.searchsorted(np.asarray(edges), length[there], side="left"), columns[there])
    return sums


def _buckets(sums: Floats) -> Iterable[LengthBucket]:
    for name, (rows, tokens, kept, kept_rows) in zip(BUCKETS, sums, strict=True):
        if rows:
            yield LengthBucket(name, int(rows), float(kept / tokens), float(kept_rows / rows))


def _mean(values: NDArray[np.generic] | Sequence[float]) -> float:
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else math.nan
