"""Statistics of a recording by step and by length, from the recorded columns, without a replay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...correction.ratios import EXP_CLAMP
from ...correction.statistics import BUCKETS
from ...recording import Step
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
        kl_fresh, fresh_tokens: KL over tokens sampled with fresh weights (staleness 0 or unknown), and the number of
            these tokens.
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
        reasons: each part that rejected tokens -> the share of all response tokens that this part rejected on its own.
        correction: plain values of the correction that was active at the last step.
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
        """True if some rows were sampled with older weights."""
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
    """The contribution to a timeline of one step, or of the step's updates under one correction.

    Attributes:
        lengths: (buckets, 4): rows, response tokens, tokens kept, rows kept.
        rejected: part of the correction -> number of response tokens that it rejected.
    """

    numbers: StepNumbers
    lengths: Floats
    rejected: Mapping[str, int]
    correction: Mapping[str, Any]


def build_timeline(steps: Iterable[Step], jobs: Jobs = ALONE) -> Timeline:
    """Build the timeline, one step in memory at a time; a step without recorded rows is skipped.

    Args:
        steps: a recording, or steps in memory.
        jobs: the processes that read the steps of a recording.
    """
    return merge_parts(chain.from_iterable(map_steps(summarize_steps, steps, jobs, "over time")))


def merge_parts(parts: Iterable[Part]) -> Timeline:
    """Merge the parts of all steps, in order, into a timeline."""
    parts = list(parts)
    steps = tuple(part.numbers for part in parts)
    corrections = [part.correction for part in parts]
    changed = tuple(
        step.step for step, now, before in zip(steps[1:], corrections[1:], corrections, strict=False) if now != before
    )
    buckets = sum((part.lengths for part in parts), np.zeros((len(BUCKETS), 4)))
    lengths = tuple(
        LengthBucket(name, int(rows), float(kept / tokens), float(kept_rows / rows))
        for name, (rows, tokens, kept, kept_rows) in zip(BUCKETS, buckets, strict=True)
        if rows
    )
    rejected: Counter[str] = Counter()
    for part in parts:
        rejected.update(part.rejected)
    tokens = sum(step.tokens for step in steps)
    reasons = {reason: count / tokens if tokens else math.nan for reason, count in rejected.items()}
    return Timeline(steps, lengths, reasons, corrections[-1] if corrections else {}, changed)


def summarize_steps(steps: Iterable[Step]) -> list[Part]:
    """Summarize each step that has a response."""
    return [_summarize(step) for step in steps if len(step.rows)]


def _summarize(step: Step) -> Part:
    rows, mask = step.rows, step.rows.response_mask
    old = get_trainers_pi_old(step).astype(np.float64)
    unscored = int((~find_scored_rows(step)).sum())
    with np.errstate(invalid="ignore"):
        # The correction compared mu with its own pi_old; the mismatch of the engines is measured with the trainer's
        # pi_old.
        valid = mask & np.isfinite(rows.old_log_prob.astype(np.float64) - rows.rollout_log_prob)
        gap, moved = old - rows.rollout_log_prob, rows.log_prob - old
        k3 = np.expm1(np.clip(gap, -EXP_CLAMP, EXP_CLAMP)) - gap
    finite = valid & np.isfinite(rows.log_prob)
    compared = mask & np.isfinite(gap)
    fresh = compared & (rows.token_staleness <= 0)
    keep = valid & (rows.rejected_by == 0)
    applied = rows.weight[keep].astype(np.float64)
    square = float(applied @ applied)

    def by_row(tokens: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.bincount(rows.row_of_token[tokens], minlength=len(rows))

    of_mask, of_valid, of_keep = by_row(mask), by_row(valid), by_row(keep)
    has_tokens = of_mask > 0
    numbers = StepNumbers(
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
        staleness=_mean(rows.staleness[rows.staleness >= 0]),
        kept_tokens=_mean(keep[mask]),
        kept_rows=_mean(of_keep[has_tokens] > 0),
        ess=float(applied.sum()) ** 2 / (int(valid.sum()) * square) if square > 0 else math.nan,
        nonfinite=int((mask & ~finite).sum()),
        extensions={name: _mean(found[mask & np.isfinite(found)]) for name, found in rows.extensions.items()},
    )
    columns = np.stack([of_valid > 0, of_mask, of_keep, of_keep > 0], axis=-1).astype(np.float64)
    edges = [most for most in BUCKETS.values() if most is not None]
    lengths = np.zeros((len(BUCKETS), columns.shape[1]))
    # ``add.at`` adds up all rows of a bucket, whereas an indexed += would keep only the last row.
    there = of_valid > 0
    np.add.at(lengths, np.searchsorted(np.asarray(edges), of_valid[there], side="left"), columns[there])
    by_bit = ((rows.rejected_by >> np.uint32(bit)) & 1 for bit in range(len(step.reasons)))
    rejected = {reason: int(hit.sum()) for reason, hit in zip(step.reasons, by_bit, strict=True)}
    return Part(numbers, lengths, rejected, step.spec)


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else math.nan
