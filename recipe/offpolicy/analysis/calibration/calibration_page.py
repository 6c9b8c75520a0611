"""Tables, sentences, overrides, JSON and figures of a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...correction import CorrectionSpec
from ...correction.bounds import format_bounds
from ...correction.statistics import BUCKETS
from ...recording import Step
from ..jobs import ALONE, Jobs, map_steps
from ..plotting import INK, Axis, Mark, Panel, Rule, draw_panels, style_line
from ..table import Column, Table, to_plain
from ..whatif.candidates import build_overrides, initialize_composer
from ..whatif.replay import Decision, compute_constants, decide, iterate_blocks
from .kept_bounds import EssCurve, KeptCurve, Threshold
from .parts import BoundedPart
from .propose import CalibrationResult, LengthBound, Proposal
from .scores import read_recorded_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class JointShares:
    """Shares kept by all parts of a correction together.

    Attributes:
        tokens: share of response tokens kept.
        rows: share of rows with a kept token.
        ess: (sum w)^2 / (n sum w^2) over valid tokens, where w is weight times keep.
    """

    tokens: float
    rows: float
    ess: float


def compute_joint_shares(
    steps: Iterable[Step], specs: Sequence[CorrectionSpec], jobs: Jobs = ALONE
) -> list[JointShares]:
    """Replay each of ``specs`` over ``steps`` and compute its kept shares; shares without a denominator are NaN.

    Args:
        steps: a recording, or steps in memory.
        jobs: the processes that replay the steps of a recording.
    """
    found = np.zeros((len(specs), 7))
    whole = any(spec.needs_constants for spec in specs)
    for sums in map_steps(partial(_sum_step, specs), steps, jobs, "replaying", in_pieces=not whole):
        found += sums
    return [_build_shares(*sums) for sums in found.tolist()]


def _build_shares(
    tokens: float, kept: float, rows: float, kept_rows: float, valid: float, total: float, square: float
) -> JointShares:
    return JointShares(
        tokens=kept / tokens if tokens else math.nan,
        rows=kept_rows / rows if rows else math.nan,
        ess=total**2 / (valid * square) if square else math.nan,
    )


@torch.no_grad()
def _sum_step(specs: Sequence[CorrectionSpec], steps: Iterable[Step]) -> NDArray[np.float64]:
    """Sum each spec's decisions on one step: (specs, 7), the arguments of ``_build_shares``."""
    found = np.zeros((len(specs), 7))
    for step in steps:
        recorded = read_recorded_spec(step)
        constants = [compute_constants(spec, recorded, step.rows) for spec in specs]
        for block in iterate_blocks(step.rows):
            shared = (int(block.mask.sum()), int(block.mask.any(-1).sum()))
            for sums, spec, of_batch in zip(found, specs, constants, strict=True):
                sums += _sum_decision(*shared, decide(spec, recorded, block, of_batch))
    return found


def _sum_decision(tokens: int, rows: int, decided: Decision) -> NDArray[np.float64]:
    # Rejected tokens count as tokens of weight 0, as in the loss.
    weight = decided.weight.double() * decided.keep
    kept, valid = decided.keep, int(decided.valid.sum())
    total, square = float(weight.sum()), float(weight.square().sum())
    return np.array([tokens, int(kept.sum()), rows, int(kept.any(-1).sum()), valid, total, square])


BY_LENGTH = "advice only: the correction takes one bound; the table shows which lengths it would affect"


def build_overview_table(result: CalibrationResult, confidence: float) -> Table:
    """Build the table of proposals: current and proposed bounds, and the share that each keeps."""
    partial = any(proposal.looked < 1 for proposal in result.proposals)
    columns = (
        Column("bound"),
        Column("of"),
        Column("target", digits=4),
        Column("now"),
        Column("reaches", digits=4),
        *([Column("of all", digits=4)] if partial else []),
        Column("proposed"),
        Column(f"{confidence:.0%} interval"),
        Column("then reaches", digits=4),
        *([Column("then of all", digits=4)] if partial else []),
        Column("units"),
        Column("prompts"),
    )
    rows = [
        (
            proposal.part.key,
            _counted(proposal),
            proposal.goal,
            format_bounds(proposal.part.now),
            proposal.now,
            *([proposal.to_all_units(proposal.now)] if partial else []),
            format_bounds(proposal.threshold.values) if proposal.found else "none",
            _format_interval(proposal.part, proposal.threshold),
            proposal.threshold.reached,
            *([proposal.to_all_units(proposal.threshold.reached)] if partial else []),
            proposal.threshold.count,
            proposal.threshold.groups,
        )
        for proposal in result.proposals
    ]
    return Table(columns, rows, "Proposed bounds")


def _counted(proposal: Proposal) -> str:
    """Return the name of the units that a target's share counts."""
    return "ESS" if proposal.target == "ess" else f"kept of {proposal.part.looks_at}"


def build_length_table(proposal: Proposal, confidence: float) -> Table:
    """Build the table of bounds by length bucket, which only serves as advice."""
    part = proposal.part
    remarked = any(entry.threshold.note for entry in proposal.lengths)
    common = proposal.threshold.values or ({} if part.unset else part.now)
    columns = (
        Column("T"),
        Column("rows"),
        Column(f"{format_bounds(common) if common else 'the common bound'} reaches", digits=4),
        Column(f"reaches {proposal.goal:g} alone"),
        Column(f"{confidence:.0%} interval"),
        *([Column("remark")] if remarked else []),
    )
    rows = [
        (
            format_bucket(entry.bucket),
            entry.rows,
            entry.reached,
            format_bounds(entry.threshold.values) if entry.threshold.values else "none",
            _format_interval(proposal.part, entry.threshold),
            *([entry.threshold.note] if remarked else []),
        )
        for entry in proposal.lengths
    ]
    return Table(columns, rows, f"{part.key} by length: {BY_LENGTH}")


def build_length_tables(result: CalibrationResult, confidence: float) -> list[Table]:
    """Build the table of each proposal with bounds by length."""
    return [build_length_table(proposal, confidence) for proposal in result.proposals if proposal.lengths]


def build_joint_table(now: JointShares | None, then: JointShares) -> Table:
    """Build the table of the whole correction, with its shares before and after the proposals."""
    columns = (Column(""), Column("now", digits=4), Column("then", digits=4))
    named = {"response tokens kept": "tokens", "rows with a token kept": "rows", "ESS of weight x keep": "ess"}
    rows = [(text, None if now is None else getattr(now, key), getattr(then, key)) for text, key in named.items()]
    return Table(columns, rows, "All of it together")


def format_remarks(result: CalibrationResult, confidence: float) -> list[str]:
    """Format the limitations of the tables, one sentence each."""
    sentences = []
    for proposal in result.proposals:
        name, threshold = proposal.part.key, proposal.threshold
        if threshold.note:
            sentences.append(threshold.note if threshold.missing is not None else f"{name}: {threshold.note}.")
        sentences += [_floor(proposal, confidence)] if proposal.floor is not None else []
        sentences.append(_describe_length_dependence(proposal, confidence))
    sentences += [f"{key}: not calibrated, {why}." for key, why in result.skipped.items()]
    if result.nonfinite:
        sentences.append(
            f"{result.nonfinite:,} response tokens have a log_prob that is not finite: bounds on pi leave "
            f"them out, and training stops at such a token."
        )
    if result.grouped < 1:
        sentences.append(
            f"For {1 - result.grouped:.0%} of the rows, the prompt was not recorded. These rows count as independent, "
            "so the intervals are too narrow if they are not."
        )
    return sentences


def _describe_length_dependence(proposal: Proposal, confidence: float) -> str:
    """Describe whether the statistic depends on the length of a row, with the test's numbers."""
    name, test = proposal.part.key, proposal.length
    if math.isnan(test.correlation):
        return f"{name}: {test.rows} comparable rows are too few to show whether it depends on length."
    criterion = (
        f"rank correlation of its {test.measure} with T {test.correlation:+.2f}, {confidence:.0%} interval "
        f"[{test.interval[0]:+.2f}, {test.interval[1]:+.2f}]"
    )
    if not test.depends:
        return f"{name}: no dependence on length was found ({criterion}), so one bound suits all lengths."
    direction = "short" if test.correlation < 0 else "long"
    advice = " The correction takes one bound: see the bounds by length before setting it." if proposal.lengths else ""
    return f"{name}: depends on length ({criterion}), so one bound rejects {direction} rows first.{advice}"


def list_overrides(result: CalibrationResult) -> list[str]:
    """List the overrides of the correction with the bounds found; empty if no bound was found."""
    if not any(proposal.found for proposal in result.proposals):
        return []
    with initialize_composer():
        return build_overrides(result.spec)


def _format_interval(part: BoundedPart, threshold: Threshold) -> str:
    """Format the interval in configured values; "-" if there is no interval."""
    low, high = threshold.interval
    if not threshold.values or math.isnan(low):
        return "-"
    name = list(part.now)[-1]
    ends = [_end(part, name, radius) for radius in (low, high)]
    text = " to ".join("open" if math.isinf(end) else f"{end:.5g}" for end in ends)
    return f"{name} {text}"


def format_bucket(bucket: str) -> str:
    """Format ``le64`` as ``17 to 64``."""
    names, most = list(BUCKETS), BUCKETS[bucket]
    before = BUCKETS[names[names.index(bucket) - 1]] if names.index(bucket) else 0
    return f"over {before}" if most is None else f"{(before or 0) + 1} to {most}"


def build_json(
    result: CalibrationResult, now: JointShares | None, then: JointShares, confidence: float
) -> dict[str, Any]:
    """Build the JSON document of a calibration; a missing value is None."""
    document = {
        "confidence": confidence,
        "overrides": list_overrides(result),
        "proposals": [_describe(proposal) for proposal in result.proposals],
        "together": {"now": now, "then": then},
        "skipped": result.skipped,
        "remarks": format_remarks(result, confidence),
    }
    return dict(to_plain(document))


def _describe(proposal: Proposal) -> dict[str, Any]:
    part, test = proposal.part, proposal.length
    return {
        "key": f"correction.{part.key}",
        "side": part.side,
        "target": proposal.target,
        "of": "tokens" if proposal.target == "ess" else part.share_of,
        "goal": proposal.goal,
        "now": part.now,
        "looked": proposal.looked,
        "reached_now": proposal.now,
        "reached_now_of_all": proposal.to_all_units(proposal.now),
        "reached_of_all": proposal.to_all_units(proposal.threshold.reached),
        "proposed": _threshold(part, proposal.threshold),
        "floor": proposal.floor,
        "length": vars(test) | {"depends": test.depends},
        "by_length": {entry.bucket: _of_length(part, entry) for entry in proposal.lengths},
    }


def _of_length(part: BoundedPart, entry: LengthBound) -> dict[str, Any]:
    return {"rows": entry.rows, "reached": entry.reached, "alone": _threshold(part, entry.threshold)}


def _threshold(part: BoundedPart, threshold: Threshold) -> dict[str, Any]:
    name = list(part.now)[-1]
    return {
        "values": threshold.values,
        "interval": {name: [_end(part, name, radius) for radius in threshold.interval]},
        "reached": threshold.reached,
        "units": threshold.count,
        "prompts": threshold.groups,
        "note": threshold.note,
    }


def _end(part: BoundedPart, name: str, radius: float) -> float:
    """Convert an end of an interval to the configured value ``name``; infinite if the interval is open at this end."""
    return radius if not math.isfinite(radius) else part.compute_values_at(radius)[name]


def _floor(proposal: Proposal, confidence: float) -> str:
    floor = proposal.floor
    assert floor is not None
    assumed = (
        f" The weight versions of {floor.unknown_versions} of these rows are unknown; they count as fresh."
        if floor.unknown_versions
        else ""
    )
    return (
        f"{proposal.part.key}: in {floor.rows} rows of {floor.groups} prompts at pi = pi_old, backend noise alone "
        f"reaches {floor.quantile:.4g} nats at its {floor.share:g}-quantile, and at most {floor.delta:.4g} with "
        f"{confidence:.0%} confidence: delta must be at least that large.{assumed}"
    )


_LEAST_SHARE = 0.5
"""Smallest kept share to show in a figure; bounds that keep less are not of interest."""
_FAR = 30
"""A bound is not drawn if it lies beyond this multiple of the last unit's position."""
_ALIKE = 1.05
_HEIGHT = 4.3
"""Height of a panel in inches; some panels have nine lines to label."""


def draw_curves(proposals: Sequence[Proposal], confidence: float) -> Figure:
    """Draw all panels into one figure."""
    return draw_panels(build_panels(proposals, confidence), columns=min(len(proposals), 2))


def build_panels(proposals: Sequence[Proposal], confidence: float) -> list[Panel]:
    """Build one panel for each proposal."""
    return [_build_panel(proposal, confidence) for proposal in proposals]


def format_caption(proposal: Proposal) -> str:
    """Format the alternative text of a panel."""
    what = "ESS" if proposal.target == "ess" else f"share of {proposal.part.looks_at} kept"
    reached = (
        f"{format_bounds(proposal.threshold.values)} reaches {proposal.threshold.reached:.4f}"
        if proposal.found
        else "no bound was found"
    )
    return f"{proposal.part.key}: {what} by bound; {reached}."


def _name_in_words(proposal: Proposal) -> str:
    """Write ``masks.gsm`` as ``Mask gsm``."""
    kind, _, name = proposal.part.key.partition(".")
    return f"{'Mask' if kind == 'masks' else 'Weight'} {name}".rstrip()


def _build_panel(proposal: Proposal, confidence: float) -> Panel:
    curve = proposal.curve
    if isinstance(curve, EssCurve):
        lines = {"all lengths": (curve.radius, curve.ess)}
        band, first = curve.compute_band(confidence), float(curve.radius.max(initial=0.0)) / 300
        y = Axis("ESS of the weight")
    else:
        lines = {"all lengths": (curve.radius, curve.share)}
        band = (curve.low, curve.high)
        own = {entry.bucket: entry.curve for entry in proposal.lengths if isinstance(entry.curve, KeptCurve)}
        lines |= {f"T {format_bucket(bucket)}": (each.radius, each.share) for bucket, each in own.items()}
        # The axis starts at the point where a curve first reaches the smallest share of interest.
        first = min(radius[share >= _LEAST_SHARE].min(initial=math.inf) for radius, share in lines.values())
        shares = (_LEAST_SHARE, 1.0 + 0.02 * (1 - _LEAST_SHARE))
        y = Axis(f"share of {proposal.part.looks_at} kept", limits=shares)
    limits = _widen(proposal, first, max(radius.max(initial=0.0) for radius, _ in lines.values()))
    marks: list[Mark | Rule] = []
    names = ["all lengths", *(f"T {format_bucket(bucket)}" for bucket in BUCKETS)]
    for label, (radius, share) in lines.items():
        if (there := radius > 0).any():  # the axis is logarithmic
            look = style_line(names.index(label), marker=False)
            ends = None if marks else (band[0][there], band[1][there])
            marks.append(Mark(radius[there], share[there], label, band=ends, thick=1.2 if marks else 1.8, **look))
    marks.append(Rule(proposal.goal, "y"))
    marks += _mark_bounds(proposal, limits) if len(curve.radius) else []
    x = Axis(_bound_label(proposal), log=10 if len(curve.radius) else 0, limits=limits)
    return Panel(_name_in_words(proposal), format_caption(proposal), x, y, marks, height=_HEIGHT)


def _widen(proposal: Proposal, first: float, last: float) -> tuple[float, float] | None:
    """Compute the horizontal limits, from the first share of interest to the last unit; they include the bounds."""
    last = max(last, *(bound for bound in [*_now(proposal), proposal.threshold.radius] if bound < _FAR * last), 0.0)
    return (min(first, last / 10), last * 1.3) if 0 < first < last else None


def _mark_bounds(proposal: Proposal, limits: tuple[float, float] | None) -> list[Rule]:
    """Mark the backend noise, the proposed bound and the current bound."""
    found = []
    if proposal.floor is not None and proposal.floor.delta > 0:
        start = min(proposal.floor.delta / 10, limits[0] if limits else math.inf)
        found.append(Rule(start, "x", "backend noise", end=proposal.floor.delta))
    if proposal.found and proposal.threshold.radius > 0:
        text = f"proposed: {format_bounds(proposal.threshold.values)}"
        found.append(Rule(proposal.threshold.radius, "x", text, INK, "-", 1.4))
    for index, radius in enumerate(_now(proposal)):
        text = "" if index else f"now: {format_bounds(proposal.part.now)}"
        found.append(Rule(radius, "x", text, INK, "--"))
    return found


def _now(proposal: Proposal) -> list[float]:
    """List the radii of the current bounds, merging two radii that cannot be distinguished in a figure."""
    part = proposal.part
    if part.unset:
        return []
    lower, upper = part.limits
    sides = {"both": (-lower, upper), "lower": (-lower,), "upper": (upper,)}[part.side]
    shown = sorted(side for side in sides if 0 < side < math.inf)
    return shown[:1] if len(shown) == 2 and shown[1] < _ALIKE * shown[0] else shown


def _bound_label(proposal: Proposal) -> str:
    part = proposal.part
    if "delta" in part.now:
        return "delta, nats per token" if getattr(part.spec, "aggregate", "") == "geometric" else "delta, nats"
    if not part.on_ratio or part.by_batch:
        return "bound"
    return {
        "both": "distance of the bounds from 1, |log ratio| in nats",
        "upper": "log of the upper bound, nats",
        "lower": "-log of the lower bound, nats",
    }[part.side]
