"""Tables, sentences, overrides, JSON and panels of a calibration."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...correction import CorrectionSpec
from ...correction.spec import format_bounds
from ...correction.statistics import BUCKETS
from ...recording import Step
from ..jobs import ALONE, Jobs, map_steps
from ..page import Block, Code
from ..plotting import INK, Axis, Mark, Panel, Rule, style_line
from ..table import Column, Table
from ..whatif.candidates import build_overrides, initialize_composer
from ..whatif.replay import compute_constants, decide, iterate_blocks
from .kept_bounds import Threshold
from .parts import BoundedPart
from .propose import CalibrationResult, Proposal
from .scores import read_recorded_spec


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
    return [
        JointShares(
            tokens=kept / tokens if tokens else math.nan,
            rows=kept_rows / rows if rows else math.nan,
            ess=total**2 / (valid * square) if square else math.nan,
        )
        for tokens, kept, rows, kept_rows, valid, total, square in found.tolist()
    ]


@torch.no_grad()
def _sum_step(specs: Sequence[CorrectionSpec], steps: Iterable[Step]) -> NDArray[np.float64]:
    """Sum each spec's decisions on one step: (specs, 7), in the order that ``compute_joint_shares`` reads."""
    found = np.zeros((len(specs), 7))
    for step in steps:
        recorded = read_recorded_spec(step)
        constants = [compute_constants(spec, recorded, step.rows) for spec in specs]
        for block in iterate_blocks(step.rows):
            for sums, spec, of_batch in zip(found, specs, constants, strict=True):
                decided = decide(spec, recorded, block, of_batch)
                # Rejected tokens count as tokens of weight 0, as in the loss.
                weight = decided.weight.double() * decided.keep
                masks = (block.mask, decided.keep, block.mask.any(-1), decided.keep.any(-1), decided.valid)
                sums += [*(int(mask.sum()) for mask in masks), float(weight.sum()), float(weight.square().sum())]
    return found


def _build_overview_table(result: CalibrationResult) -> Table:
    """Build the table of proposals: current and proposed bounds, and the share that each keeps."""
    rows = [
        {
            "bound": proposal.part.key,
            "of": "ESS" if proposal.target == "ess" else f"kept of {proposal.part.looks_at}",
            "target": proposal.goal,
            "now": format_bounds(proposal.part.now),
            "reaches": proposal.now,
            "of all": proposal.to_all_units(proposal.now),
            "proposed": format_bounds(proposal.threshold.values) if proposal.found else "none",
            f"{result.confidence:.0%} interval": _format_interval(proposal.part, proposal.threshold),
            "then reaches": proposal.threshold.reached,
            "then of all": proposal.to_all_units(proposal.threshold.reached),
            "units": proposal.threshold.count,
            "prompts": proposal.threshold.groups,
        }
        for proposal in result.proposals
    ]
    partial = any(proposal.looked < 1 for proposal in result.proposals)
    names = [name for name in rows[0] if partial or not name.endswith("of all")]
    columns = [Column(name, digits=4) for name in names]
    return Table(columns, [[row[name] for name in names] for row in rows], "Proposed bounds")


def _build_length_table(proposal: Proposal, confidence: float) -> Table:
    """Build the table of bounds by length, which is only advice."""
    part = proposal.part
    common = proposal.threshold.values or ({} if part.unset else part.now)
    reaches = f"{format_bounds(common) if common else 'the common bound'} reaches"
    headings = ("T", "rows", reaches, f"reaches {proposal.goal:g} alone", f"{confidence:.0%} interval", "remark")
    rows = [
        [
            *(format_bucket(entry.bucket), entry.rows, entry.reached),
            format_bounds(entry.threshold.values) if entry.threshold.values else "none",
            *(_format_interval(part, entry.threshold), entry.threshold.note),
        ]
        for entry in proposal.lengths
    ]
    advice = "advice only: the correction takes one bound, and the table shows which lengths it would affect"
    return Table([Column(name, digits=4) for name in headings], rows, f"{part.key} by length: {advice}")


def _build_joint_table(now: JointShares | None, then: JointShares) -> Table:
    """Build the table of the whole correction, with its shares before and after the proposals."""
    columns = (Column(""), Column("now", digits=4), Column("then", digits=4))
    named = {"response tokens kept": "tokens", "rows with a token kept": "rows", "ESS of weight x keep": "ess"}
    rows = [(text, None if now is None else getattr(now, key), getattr(then, key)) for text, key in named.items()]
    return Table(columns, rows, "All of it together")


def format_remarks(result: CalibrationResult) -> list[str]:
    """Format the limitations of the tables, one sentence each."""
    sentences = []
    for proposal in result.proposals:
        name, threshold = proposal.part.key, proposal.threshold
        if threshold.note:
            sentences.append(threshold.note if threshold.missing is not None else f"{name}: {threshold.note}.")
        sentences += _describe_floor(proposal, result.confidence)
        sentences.append(_describe_length_dependence(proposal, result.confidence))
    sentences += [f"{key}: not calibrated, {why}." for key, why in result.skipped.items()]
    if result.nonfinite:
        sentences.append(
            f"{result.nonfinite:,} response tokens have a log_prob that is not finite: bounds on pi leave them out, "
            "but training stops at such a token."
        )
    if result.grouped < 1:
        sentences.append(
            f"For {1 - result.grouped:.0%} of the rows, the prompt was not recorded. These rows count as independent, "
            "so the intervals are too narrow if they are not."
        )
    return sentences


def _describe_floor(proposal: Proposal, confidence: float) -> list[str]:
    floor = proposal.floor
    if floor is None:
        return []
    assumed = (
        f" The weight versions of {floor.unknown_versions} of these rows are unknown; they count as fresh."
        if floor.unknown_versions
        else ""
    )
    return [
        f"{proposal.part.key}: in {floor.rows} rows of {floor.groups} prompts at pi = pi_old, the "
        f"{floor.share:g}-quantile of backend noise alone is {floor.quantile:.4g} nats, and at most {floor.delta:.4g} "
        f"with {confidence:.0%} confidence: delta must be at least that large.{assumed}"
    ]


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
    advice = (
        (" The correction accepts only one bound: check the bounds by length before setting it.")
        if proposal.lengths
        else ""
    )
    return f"{name}: depends on length ({criterion}), so one bound rejects {direction} rows first.{advice}"


def list_overrides(result: CalibrationResult) -> list[str]:
    """List the overrides of the correction with the bounds found; empty if no bound was found."""
    if not any(proposal.found for proposal in result.proposals):
        return []
    with initialize_composer():
        return build_overrides(result.spec)


def format_bucket(bucket: str) -> str:
    """Format ``le64`` as ``17 to 64``."""
    names, most = list(BUCKETS), BUCKETS[bucket]
    before = BUCKETS[names[names.index(bucket) - 1]] if names.index(bucket) else 0
    return f"over {before}" if most is None else f"{(before or 0) + 1} to {most}"


def _format_interval(part: BoundedPart, threshold: Threshold) -> str:
    """Format the interval in configured values; "-" if there is no interval."""
    if not threshold.values or math.isnan(threshold.interval[0]):
        return "-"
    name, ends = _interval(part, threshold)
    return f"{name} {' to '.join('open' if math.isinf(end) else f'{end:.5g}' for end in ends)}"


def _interval(part: BoundedPart, threshold: Threshold) -> tuple[str, list[float]]:
    """Convert the interval of the radius to the configured value of this name; open ends stay infinite."""
    name = list(part.now)[-1]
    return name, [
        part.compute_values_at(radius)[name] if math.isfinite(radius) else radius for radius in threshold.interval
    ]


def build_blocks(
    result: CalibrationResult, now: JointShares | None = None, then: JointShares | None = None
) -> list[Block]:
    """Build the blocks of the proposals; ``now`` and ``then`` are shares of the whole correction before and after."""
    pasted = list_overrides(result)
    return [
        _build_overview_table(result),
        "" if then is None else _build_joint_table(now, then),
        [_build_panel(proposal) for proposal in result.proposals],
        *(_build_length_table(each, result.confidence) for each in result.proposals if each.lengths),
        *format_remarks(result),
        *(("Overrides:", Code(shlex.join(pasted))) if pasted else ()),
    ]


def build_document(result: CalibrationResult, now: JointShares | None, then: JointShares) -> dict[str, Any]:
    """Build the JSON document of a calibration; a missing value is None."""
    return {
        "confidence": result.confidence,
        "overrides": list_overrides(result),
        "proposals": [_describe(proposal) for proposal in result.proposals],
        "together": {"now": now, "then": then},
        "skipped": result.skipped,
        "remarks": format_remarks(result),
    }


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
        "proposed": _describe_threshold(part, proposal.threshold),
        "floor": proposal.floor,
        "length": vars(test) | {"depends": test.depends},
        "by_length": {
            each.bucket: {
                "rows": each.rows,
                "reached": each.reached,
                "alone": _describe_threshold(part, each.threshold),
            }
            for each in proposal.lengths
        },
    }


def _describe_threshold(part: BoundedPart, threshold: Threshold) -> dict[str, Any]:
    return {
        "values": threshold.values,
        "interval": dict([_interval(part, threshold)]),
        "reached": threshold.reached,
        "units": threshold.count,
        "prompts": threshold.groups,
        "note": threshold.note,
    }


_LEAST_SHARE = 0.5
"""Smallest kept share to show in a figure; bounds that keep less are not of interest."""
_FAR = 30
"""A bound is not drawn if it exceeds this multiple of the last unit's position."""
_HEIGHT = 4.3
"""Height of a panel in inches; some panels have nine lines to label."""


def _format_caption(proposal: Proposal) -> str:
    """Format the alternative text of a panel."""
    what = "ESS" if proposal.target == "ess" else f"share of {proposal.part.looks_at} kept"
    reached = "no bound was found"
    if proposal.found:
        reached = f"{format_bounds(proposal.threshold.values)} reaches {proposal.threshold.reached:.4f}"
    return f"{proposal.part.key}: {what} by bound; {reached}."


def _build_panel(proposal: Proposal) -> Panel:
    curve, own = proposal.curve, {entry.bucket: entry.curve for entry in proposal.lengths if entry.curve is not None}
    lines = {"all lengths": curve} | {f"T {format_bucket(bucket)}": each for bucket, each in own.items()}
    if proposal.target == "ess":
        first, y = float(curve.radius.max(initial=0.0)) / 300, Axis("ESS of the weight")
    else:
        # The axis starts at the point where a curve first reaches the smallest share of interest.
        first = min(one.radius[one.reached >= _LEAST_SHARE].min(initial=math.inf) for one in lines.values())
        y = Axis(f"share of {proposal.part.looks_at} kept", limits=(_LEAST_SHARE, 1.01))
    limits = _widen(proposal, first, max(one.radius.max(initial=0.0) for one in lines.values()))
    marks: list[Mark | Rule] = []
    names = ["all lengths", *(f"T {format_bucket(bucket)}" for bucket in BUCKETS)]
    for label, one in lines.items():
        if (there := one.radius > 0).any():  # the axis is logarithmic
            look = style_line(names.index(label), marker=False)
            band = None if marks else (one.low[there], one.high[there])
            thick = 1.2 if marks else 1.8
            marks.append(Mark(one.radius[there], one.reached[there], label, band=band, thick=thick, **look))
    marks.append(Rule(proposal.goal, "y"))
    marks += _mark_bounds(proposal, limits) if len(curve.radius) else []
    x = Axis(_bound_label(proposal), log=10 if len(curve.radius) else 0, limits=limits)
    kind, _, name = proposal.part.key.partition(".")
    title = f"{'Mask' if kind == 'masks' else 'Weight'} {name}".rstrip()
    return Panel(title, _format_caption(proposal), x, y, marks, height=_HEIGHT)


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
    """List the radii of the current bounds."""
    part = proposal.part
    if part.unset:
        return []
    lower, upper = part.limits
    sides = {"both": (-lower, upper), "lower": (-lower,), "upper": (upper,)}[part.side]
    return sorted(side for side in sides if 0 < side < math.inf)


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
