"""Figures of a calibration: kept share or ESS by bound, with the band and the length buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...correction.bounds import format_bounds
from ...correction.statistics import BUCKETS
from ..pages.panels import Axis, Mark, Panel, Rule, style_line
from ..pages.plotting import INK, draw_panels
from .calibration_tables import format_bucket
from .caps import EssCurve
from .kept_bounds import KeptCurve
from .propose import Proposal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEAST_SHARE = 0.5
"""Smallest kept share in a figure; bounds that keep less are not of interest."""
_FAR = 30
"""Multiple of the last unit's position beyond which a bound is not drawn."""
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
        # The axis starts where the first line reaches the smallest share of interest.
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
    """Compute the horizontal limits from the first share of interest to the last unit, including the bounds."""
    last = max(last, *(bound for bound in [*_now(proposal), proposal.threshold.radius] if bound < _FAR * last), 0.0)
    return (min(first, last / 10), last * 1.3) if 0 < first < last else None


def _mark_bounds(proposal: Proposal, limits: tuple[float, float] | None) -> list[Rule]:
    """Mark the backend noise, the proposed bound and the current one."""
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
    """List the radii of the current bounds, with one entry for two radii that a figure cannot distinguish."""
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
