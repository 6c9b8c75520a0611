"""Calibration curves: kept share or ESS by bound, with the band and the lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...correction.catalogue import BUCKETS
from ..pages.figures import INK, MUTED, Panel, legend, look, picture
from .caps import EssCurve
from .curves import KeptCurve
from .propose import Proposal
from .tables import bounds, bucket_text, part_name

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


def curves(proposals: Sequence[Proposal], confidence: float) -> Figure:
    """All panels in one figure."""
    return picture(panels(proposals, confidence), columns=min(len(proposals), 2))


def panels(proposals: Sequence[Proposal], confidence: float) -> list[Panel]:
    """A panel a bound."""
    return [
        Panel(partial(_panel, proposal=proposal, confidence=confidence), caption(proposal), _HEIGHT)
        for proposal in proposals
    ]


def caption(proposal: Proposal) -> str:
    """What a panel shows, for who cannot see it."""
    what = "ESS" if proposal.target == "ess" else f"share of {proposal.part.looks_at} kept"
    reached = (
        f"{bounds(proposal.threshold.values)} reaches {proposal.threshold.reached:.4f}"
        if proposal.found
        else "no bound was found"
    )
    return f"{part_name(proposal.part)}: {what} by bound; {reached}."


def _panel(axis: Axes, *, proposal: Proposal, confidence: float) -> None:
    curve = proposal.curve
    axis.set_title(part_name(proposal.part))
    axis.set_xlabel(_bound_label(proposal))
    axis.set_ylabel("ESS of the weight" if proposal.target == "ess" else f"share of {proposal.part.looks_at} kept")
    if isinstance(curve, EssCurve):
        low, high = curve.band(confidence)
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
                    **(look(index) | {"marker": ""}),
                    linewidth=1.2,
                    label=f"T {bucket_text(entry.bucket)}",
                )
        axis.set_ylim(_LEAST_SHARE, 1.0 + 0.02 * (1 - _LEAST_SHARE))
        lines = [curve, *(entry.curve for entry in proposal.lengths if entry.curve is not None)]
        first = min(line.radius[line.share >= _LEAST_SHARE].min(initial=math.inf) for line in lines)
        _widen(axis, proposal, first, max(line.radius.max(initial=0.0) for line in lines))
    axis.axhline(proposal.goal, color=MUTED, linewidth=1, linestyle=":")
    if len(curve.radius):
        axis.set_xscale("log")
        _ticks(axis)
        _marks(axis, proposal)
    legend(axis)


def _ticks(axis: Axes) -> None:
    """Plain numbers that have room: powers of ten, and 2 and 5 between them where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    first, last = axis.get_xlim()
    steps = (1.0, 2.0, 5.0) if last < _FEW_DECADES * first else (1.0,)
    axis.xaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _line(axis: Axes, x: np.ndarray, y: np.ndarray, low: np.ndarray, high: np.ndarray, label: str) -> None:
    shown = x > 0
    if not shown.any():
        return
    axis.plot(x[shown], y[shown], **(look(0) | {"marker": ""}), label=label)
    axis.fill_between(x[shown], low[shown], high[shown], color=look(0)["color"], alpha=0.18, linewidth=0)


def _widen(axis: Axes, proposal: Proposal, first: float, last: float) -> None:
    """From where something of interest is kept to the last unit, with the bounds."""
    last = max(last, *(bound for bound in [*_now(proposal), proposal.threshold.radius] if bound < _FAR * last), 0.0)
    if 0 < first < last:
        axis.set_xlim(min(first, last / 10), last * 1.3)


def _marks(axis: Axes, proposal: Proposal) -> None:
    """The backend's noise, the proposed bound and the present one, by name."""
    if proposal.floor is not None and proposal.floor.delta > 0:
        axis.axvspan(
            axis.get_xlim()[0], proposal.floor.delta, color=MUTED, alpha=0.15, linewidth=0, label="backend noise"
        )
    if proposal.found and proposal.threshold.radius > 0:
        axis.axvline(proposal.threshold.radius, color=INK, linewidth=1.4)
        text = f"proposed: {bounds(proposal.threshold.values)}"
        axis.plot([], [], color=INK, linewidth=1.4, label=text)
    for index, radius in enumerate(_now(proposal)):
        axis.axvline(radius, color=INK, linewidth=1, linestyle="--")
        if not index:
            axis.plot([], [], color=INK, linewidth=1, linestyle="--", label=f"now: {bounds(proposal.part.now)}")


def _now(proposal: Proposal) -> list[float]:
    """Where the present bounds lie; one place for two that a picture cannot tell apart."""
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
