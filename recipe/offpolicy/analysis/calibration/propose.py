"""Propose bounds that meet a target on a recording and exceed the noise floor: overall and, if needed, per length.

In a mean over T tokens, zero-mean noise averages out, and the spread falls as T^-1/2. In a sum over T tokens, noise
adds up, and the spread grows as T^1/2. A bound on a geometric mean therefore rejects short rows, and a bound on a
product rejects long rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...correction import CorrectionSpec, SpecError, WeightSpec
from ...correction.statistics import BUCKETS
from ...recording import Step
from ..jobs import ALONE, Jobs
from . import QUANTILE
from .floor import Floats, Interval, NoiseFloor, NotIdentifiedError, compute_normal_bound, estimate_noise_floor
from .kept_bounds import (
    Curve,
    Threshold,
    build_not_found,
    choose_radii,
    compute_ess,
    compute_ess_curve,
    compute_kept_curve,
    compute_kept_share,
    find_bound_for_kept_share,
    find_cap_for_ess,
)
from .parts import BoundedPart, list_parts, set_values
from .scores import EVERY_PROMPT, PromptSample, RowState, Scores, compute_scores

LEAST_ROWS = 20
"""Minimum number of rows for a bucket to be included in the test."""


@dataclass(frozen=True)
class LengthTest:
    """Spearman's rank correlation between a row's distance and its length.

    Attributes:
        correlation: correlation between length and the distance named by ``measure``; NaN if there is nothing to
            compare.
        interval: confidence interval of the correlation, computed from the variance over prompt groups.
        measure: ``size``, the distance from no mismatch, or ``spread``, the distance from the median of rows of similar
            length.
        rows: number of rows that were compared.
    """

    correlation: float
    interval: Interval
    measure: str
    rows: int

    @property
    def depends(self) -> bool:
        """True if the interval excludes 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


def find_length_bucket(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find the index into ``BUCKETS`` of each T >= 1, (U,), as for the metrics of ``offpolicy/length/``."""
    edges = [most for most in BUCKETS.values() if most is not None]
    return np.searchsorted(np.asarray(edges), length, side="left")


def measure_length_dependence(scores: Scores, confidence: float) -> LengthTest:
    """Test if size and spread depend on length, each at half the error rate (Bonferroni); return the clearer result.

    Values per token or turn are first averaged over their row, so that each row counts once.
    """
    # The two tests detect different faults: a shift of the mean, and a change of the scatter around it.
    size, row_length, group = _by_row(np.maximum(np.abs(scores.low), np.abs(scores.high)), scores)
    middle = (scores.low + scores.high) / 2
    spread, _, _ = _by_row(np.abs(middle - _bucket_medians(middle, scores.length)), scores)
    counts = np.bincount(find_length_bucket(row_length), minlength=len(BUCKETS))
    enough = counts[find_length_bucket(row_length)] >= LEAST_ROWS
    tests = [
        _rank_test(name, distance[enough], row_length[enough], group[enough], (1 + confidence) / 2)
        for name, distance in (("size", size), ("spread", spread))
    ]
    return max(tests, key=lambda test: (test.depends, abs(test.correlation) if test.rows else 0.0))


def _rank_test(
    name: str, distance: Floats, length: NDArray[np.int64], group: NDArray[np.int64], confidence: float
) -> LengthTest:
    """Compute the rank correlation of a distance with length, and its interval over prompt groups."""
    rows = len(distance)
    x, y = _ranks(length.astype(np.float64)), _ranks(distance)
    groups = len(np.unique(group))
    if rows < 3 or groups < 3 or not x.any() or not y.any():
        return LengthTest(math.nan, (math.nan, math.nan), name, rows)
    x, y = x / math.sqrt(x @ x), y / math.sqrt(y @ y)
    correlation = float(x @ y)
    # The variance of a correlation is computed from its influence function, which is summed within groups.
    influence = x * y - correlation / 2 * (x * x + y * y)
    totals = np.bincount(group, weights=influence)
    half = compute_normal_bound(confidence) * math.sqrt(groups / (groups - 1) * float(totals @ totals))
    return LengthTest(correlation, (correlation - half, correlation + half), name, rows)


def _by_row(values: Floats, scores: Scores) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Compute the mean of ``values`` over each row's units; also return each row's length and group."""
    _, first, index, counts = np.unique(scores.row, return_index=True, return_inverse=True, return_counts=True)
    return np.bincount(index, weights=values) / counts, scores.length[first], scores.group[first]


def _bucket_medians(values: Floats, length: NDArray[np.int64]) -> Floats:
    """Compute the median over each unit's length bucket, (U,)."""
    units = pl.DataFrame({"value": values, "bucket": find_length_bucket(length)})
    return units.select(pl.col("value").median().over("bucket")).to_series().to_numpy()


def _ranks(values: Floats) -> Floats:
    """Compute centred ranks; equal values share a rank."""
    ranks = pl.Series(values).rank()
    return (ranks - ranks.mean()).to_numpy()


Target = Literal["kept", "ess"]


@dataclass(frozen=True)
class CalibrationRequest:
    """Targets and options of a calibration.

    Attributes:
        target_kept: share that each mask, and a weight that rejects, must keep on its own, among the units to which it
            applies (for OPSM: of rows with a negative advantage); None for no target.
        target_ess: effective sample size that the weight must have; None for no target.
        confidence: confidence level of every interval.
        floor_quantile: see ``estimate_noise_floor``.
        settle: whether to use the highest quantile that the recording can bound if the recording is too short for
            ``floor_quantile``.
    """

    target_kept: float | None = None
    target_ess: float | None = None
    confidence: float = 0.95
    floor_quantile: float = QUANTILE
    settle: bool = False

    def check(self) -> None:
        """Raise SpecError if a value is out of range."""
        for name in ("target_kept", "target_ess", "confidence", "floor_quantile"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise SpecError(f"--{name.replace('_', '-')} {value}: expected a number between 0 and 1.")
        if self.target_kept is None and self.target_ess is None:
            raise SpecError("no target: pass --target-kept 0.98 for masks, --target-ess 0.9 for a weight, or both.")


@dataclass(frozen=True)
class LengthBound:
    """A bound that is based only on the rows of one length bucket.

    Attributes:
        bucket: name of the bucket in the metrics.
        rows: number of rows of these lengths to which the part applies.
        reached: value that the bound for all lengths reaches on these rows; this is the proposed bound, if there is
            one, otherwise the current bound.
        threshold: the bound that would meet the target on these rows alone.
        curve: curve of a kept share.
    """

    bucket: str
    rows: int
    reached: float
    threshold: Threshold
    curve: Curve | None


@dataclass(frozen=True)
class Proposal:
    """A proposed bound, its evidence and its effect.

    Attributes:
        part: the part whose bound is proposed.
        target, goal: the measure for which a target is set, and the value that it must reach.
        looked: share of all units to which the part applies; all other units are kept regardless of the bound.
        now: value that the current bound reaches; NaN if the bound is not set yet.
        threshold: the bound for all lengths together.
        floor: noise floor of a delta; None for other bounds.
        length: whether the statistic depends on T.
        lengths: bounds by length; empty if the statistic does not depend on length.
        curve: kept share or ESS by bound.
    """

    part: BoundedPart
    target: Target
    goal: float
    looked: float
    now: float
    threshold: Threshold
    floor: NoiseFloor | None
    length: LengthTest
    lengths: tuple[LengthBound, ...]
    curve: Curve

    @property
    def found(self) -> bool:
        """True if there is a bound to set."""
        return bool(self.threshold.values)

    def to_all_units(self, reached: float) -> float:
        """Convert a share of the units to which the part applies into a share of all units; NaN for an ESS."""
        return 1 - self.looked * (1 - reached) if self.target == "kept" else math.nan


@dataclass(frozen=True)
class CalibrationResult:
    """All proposals, and the correction with the proposed bounds.

    Attributes:
        spec: the correction with the proposed bounds, without masks that have neither a current nor a proposed bound.
        confidence: confidence level of every interval.
        skipped: key -> why nothing was proposed for it.
        grouped: share of rows whose prompt is known; intervals treat the other rows as independent.
        nonfinite: number of tokens that parts on pi exclude because the token's log pi is not finite.
    """

    spec: CorrectionSpec
    proposals: tuple[Proposal, ...]
    confidence: float
    skipped: dict[str, str]
    grouped: float
    nonfinite: int = 0


def propose_bounds(
    steps: Iterable[Step],
    spec: CorrectionSpec,
    request: CalibrationRequest,
    unset: Collection[str] = (),
    *,
    sample: PromptSample = EVERY_PROMPT,
    jobs: Jobs = ALONE,
) -> CalibrationResult:
    """Propose bounds for ``spec`` from recorded steps.

    Args:
        steps: a recording, or steps in memory; iterated once.
        unset: keys of values that are placeholders, see ``parts.fill_placeholders``.
        sample: sample of the prompts on which the bounds are based.
        jobs: the processes that read the steps of a recording.

    Raises:
        SpecError: nothing can be calibrated, or no part accepts a target.
        RecordingError: the recording has no data to calibrate with.
    """
    request.check()
    parts, skipped = list_parts(spec, unset), {}
    goals = {part.key: goal for part in parts if (goal := _find_goal(part, request)) is not None}
    for part in parts:
        if part.key in goals:
            continue
        if part.rejects:
            skipped[part.key] = "takes --target-kept"
        elif part.spec.by_staleness is not None:
            skipped[part.key] = "has a cap for each age (by_staleness), but an ESS target fits only a single cap"
        else:
            skipped[part.key] = "accepts only --target-ess, because it keeps every token and caps its weight"
    if not goals:
        reasons = "; ".join(f"{key} {why}" for key, why in skipped.items())
        raise SpecError(f"no part of the correction can use the given target: {reasons}.")
    parts = [part for part in parts if part.key in goals]
    scores, state = compute_scores(steps, spec, parts, sample=sample, jobs=jobs)
    proposals = tuple(_propose(_Evidence(part, *goals[part.key], scores[part.key], state, request)) for part in parts)
    for proposal in proposals:
        if proposal.found:
            spec = set_values(spec, proposal.part.key, proposal.threshold.values)
    found = {proposal.part.key for proposal in proposals if proposal.found}
    # A mask that requires a delta is invalid if none was found.
    open_masks = {key.split(".")[1] for key in unset if key.rpartition(".")[0] not in found}
    spec = replace(spec, masks=tuple((name, mask) for name, mask in spec.masks if name not in open_masks))
    nonfinite = int(state.nonfinite.sum()) if any(part.spec.ratio != "rollout" for part in parts) else 0
    return CalibrationResult(spec, proposals, request.confidence, skipped, float(state.grouped.mean()), nonfinite)


def _find_goal(part: BoundedPart, request: CalibrationRequest) -> tuple[Target, float] | None:
    """Return the target of a part. A weight that rejects accepts both targets; the kept share takes precedence."""
    if part.rejects and request.target_kept is not None:
        return "kept", request.target_kept
    if isinstance(part.spec, WeightSpec) and part.spec.by_staleness is None and request.target_ess is not None:
        return "ess", request.target_ess
    return None


@dataclass(frozen=True)
class _Evidence:
    """The units of a part, or only those of some lengths, with the target that its bound must reach."""

    part: BoundedPart
    target: Target
    goal: float
    scores: Scores
    state: RowState
    request: CalibrationRequest

    @property
    def looked(self) -> Scores:
        """The units to which the part applies."""
        return self.scores.select(self.scores.looked)

    def explain_few(self) -> str:
        """Explain that there are fewer rows than a bound needs; empty if there are enough rows."""
        rows = len(np.unique(self.looked.row))
        return f"only {rows} rows, and a bound needs {LEAST_ROWS}" if rows < LEAST_ROWS else ""

    def reach(self, limits: tuple[float, float]) -> float:
        """Compute the value that bounds at ``limits`` reach, measured like the target."""
        return (compute_ess if self.target == "ess" else compute_kept_share)(self.part, self.scores, limits)

    def estimate_floor(self) -> NoiseFloor | None:
        """Estimate the noise floor of a delta; None for other bounds."""
        if "delta" not in self.part.now:
            return None
        share, confidence = self.request.floor_quantile, self.request.confidence
        return estimate_noise_floor(self.part, self.scores, self.state, share=share, confidence=confidence)

    def find(self, floor: NoiseFloor | None) -> Threshold:
        """Find the bound that reaches the target."""
        arguments = (self.part, self.scores, self.goal, self.request.confidence)
        if self.target == "ess":
            return find_cap_for_ess(*arguments)
        return find_bound_for_kept_share(*arguments, floor=floor.delta if floor else -math.inf)


def _propose(evidence: _Evidence) -> Proposal:
    part, target, request = evidence.part, evidence.target, evidence.request
    share = float(evidence.scores.looked.mean())
    if target == "ess":
        # The ESS is computed from the part's weights.
        evidence = replace(evidence, scores=evidence.looked)
    floor, lacking = None, None
    try:
        floor = evidence.estimate_floor()
    except NotIdentifiedError as error:
        lacking = error
        if request.settle and error.share is not None:
            evidence = replace(evidence, request=replace(request, floor_quantile=error.share))
            floor, lacking = evidence.estimate_floor(), None
    scores = evidence.scores
    if lacking is not None:
        threshold = replace(build_not_found(evidence.looked, str(lacking)), missing=lacking)
    elif few := evidence.explain_few():
        threshold = build_not_found(evidence.looked, f"not identified: {few}")
    else:
        threshold = evidence.find(floor)
    length = measure_length_dependence(scores, request.confidence)
    if target == "ess":
        curve = compute_ess_curve(part, scores, request.confidence)
    else:
        curve = compute_kept_curve(part, scores, choose_radii(part, scores), request.confidence)
    now = math.nan if part.unset else evidence.reach(part.limits)
    lengths = tuple(_bound_lengths(evidence, threshold, curve.radius)) if length.depends else ()
    return Proposal(part, target, evidence.goal, share, now, threshold, floor, length, lengths, curve)


def _bound_lengths(evidence: _Evidence, overall: Threshold, radius: Floats) -> Iterator[LengthBound]:
    """Find the bound of each length bucket that has a row to which the part applies."""
    part, bucket = evidence.part, find_length_bucket(evidence.scores.length)
    for index, name in enumerate(BUCKETS):
        own = replace(evidence, scores=evidence.scores.select(bucket == index))
        looked = own.looked
        if not len(looked):
            continue
        known = bool(overall.values) or not part.unset
        reached = own.reach(part.compute_limits_with(overall.values)) if known else math.nan
        if few := own.explain_few():
            threshold = build_not_found(looked, few)
        else:
            try:
                threshold = own.find(own.estimate_floor())
            except NotIdentifiedError:
                threshold = build_not_found(looked, "its backend noise is not identified")
        line = None
        if own.target == "kept":
            line = compute_kept_curve(part, own.scores, radius, own.request.confidence)
        yield LengthBound(name, len(np.unique(looked.row)), reached, threshold, line)
