"""Figures of a calibration: kept share or ESS by bound, with the band and the length buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...correction.bound_text import format_bounds
from ...correction.catalogue import BUCKETS
from ..pages.plotting import INK, MUTED, FigurePanel, add_legend, draw_panels, get_line_style
from .calibration_tables import format_bucket, format_part_name
from .caps import EssCurve
from .curves import KeptCurve
from .propose import Proposal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEAST_SHARE = 0.5
"""Where kept shares begin on a picture: below it no bound is of interest."""
_FAR = 30
"""Times the last unit's place beyond which a bound is not drawn."""
_ALIKE = 1.05
_FEW_DECADES = 1e2
_HEIGHT = 4.3
"""Inches of a panel: some have nine lines to name."""


def draw_curves(proposals: Sequence[Proposal], confidence: float) -> Figure:
    """Draw all panels into one figure."""
    return draw_panels(build_panels(proposals, confidence), columns=min(len(proposals), 2))


def build_panels(proposals: Sequence[Proposal], confidence: float) -> list[FigurePanel]:
    """Build one panel for each proposal."""
    return [
        FigurePanel(partial(_panel, proposal=proposal, confidence=confidence), format_caption(proposal), _HEIGHT)
        for proposal in proposals
    ]


def format_caption(proposal: Proposal) -> str:
    """Format the alternative text of a panel."""
    what = "ESS" if proposal.target == "ess" else f"share of {proposal.part.looks_at} kept"
    reached = (
        f"{format_bounds(proposal.threshold.values)} reaches {proposal.threshold.reached:.4f}"
        if proposal.found
        else "no bound was found"
    )
    return f"{format_part_name(proposal.part)}: {what} by bound; {reached}."


def _name_in_words(proposal: Proposal) -> str:
    """Write ``masks.gsm`` as ``Mask gsm``."""
    kind, _, name = format_part_name(proposal.part).partition(".")
    return f"{'Mask' if kind == 'masks' else 'Weight'} {name}".rstrip()


def _panel(axis: Axes, *, proposal: Proposal, confidence: float) -> None:
    curve = proposal.curve
    axis.set_title(_name_in_words(proposal))
    axis.set_xlabel(_bound_label(proposal))
    axis.set_ylabel("ESS of the weight" if proposal.target == "ess" else f"share of {proposal.part.looks_at} kept")
    if isinstance(curve, EssCurve):
        low, high = curve.compute_band(confidence)
        _line(axis, curve.radius, curve.ess, low, high, "all lengths")
        _widen(axis, proposal, float(curve.radius.max(initial=0.0)) / 300, curve.radius.max(initial=0.0))
    else:
        _line(axis, curve.radius, curve.share, curve.low, curve.high, "all lengths")
        for entry in proposal.lengths:
            index = 1 + list(BUCKETS).index(entry.bucket)
            if isinstance(entry.curve, KeptCurve):
                axis.plot(
                    entry.curve.radius,
                    entry.curve.share,
                    **(get_line_style(index) | {"marker": ""}),
                    linewidth=1.2,
                    label=f"T {format_bucket(entry.bucket)}",
                )
        axis.set_ylim(_LEAST_SHARE, 1.0 + 0.02 * (1 - _LEAST_SHARE))
        lines = [curve, *(entry.curve for entry in proposal.lengths if entry.curve is not None)]
        # The axis starts where the first line reaches the least share of interest.
        first = min(line.radius[line.share >= _LEAST_SHARE].min(initial=math.inf) for line in lines)
        _widen(axis, proposal, first, max(line.radius.max(initial=0.0) for line in lines))
    axis.axhline(proposal.goal, color=MUTED, linewidth=1, linestyle=":")
    if len(curve.radius):
        axis.set_xscale("log")
        _ticks(axis)
        _marks(axis, proposal)
    add_legend(axis)


def _ticks(axis: Axes) -> None:
    """Set plain tick labels: powers of ten, with 2 and 5 between them where the range is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    first, last = axis.get_xlim()
    steps = (1.0, 2.0, 5.0) if last < _FEW_DECADES * first else (1.0,)
    axis.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _line(axis: Axes, x: np.ndarray, y: np.ndarray, low: np.ndarray, high: np.ndarray, label: str) -> None:
    # The axis is logarithmic.
    shown = x > 0
    if not shown.any():
        return
    axis.plot(x[shown], y[shown], **(get_line_style(0) | {"marker": ""}), label=label)
    axis.fill_between(x[shown], low[shown], high[shown], color=get_line_style(0)["color"], alpha=0.18, linewidth=0)


def _widen(axis: Axes, proposal: Proposal, first: float, last: float) -> None:
    """Set the horizontal limits from the first share of interest to the last unit, bounds included."""
    last = max(last, *(bound for bound in [*_now(proposal), proposal.threshold.radius] if bound < _FAR * last), 0.0)
    if 0 < first < last:
        axis.set_xlim(min(first, last / 10), last * 1.3)


def _marks(axis: Axes, proposal: Proposal) -> None:
    """Mark the backend noise, the proposed bound and the present one."""
    if proposal.floor is not None and proposal.floor.delta > 0:
        axis.axvspan(
            axis.get_xlim()[0], proposal.floor.delta, color=MUTED, alpha=0.15, linewidth=0, label="backend noise"
        )
    if proposal.found and proposal.threshold.radius > 0:
        axis.axvline(proposal.threshold.radius, color=INK, linewidth=1.4)
        text = f"proposed: {format_bounds(proposal.threshold.values)}"
        axis.plot([], [], color=INK, linewidth=1.4, label=text)
    for index, radius in enumerate(_now(proposal)):
        axis.axvline(radius, color=INK, linewidth=1, linestyle="--")
        if not index:
            axis.plot([], [], color=INK, linewidth=1, linestyle="--", label=f"now: {format_bounds(proposal.part.now)}")


def _now(proposal: Proposal) -> list[float]:
    """List the radii of the present bounds; one for two that a figure cannot distinguish."""
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
        return "delta, nats a token" if getattr(part.spec, "aggregate", "") == "geometric" else "delta, nats"
    if not part.on_ratio or part.by_batch:
        return "bound"
    return {
        "both": "distance of the bounds from 1, |log ratio| in nats",
        "upper": "log of the upper bound, nats",
        "lower": "-log of the lower bound, nats",
    }[part.side]
