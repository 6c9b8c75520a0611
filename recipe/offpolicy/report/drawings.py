"""The pictures that are a report's own: over time, and by length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..calibration.tables import bucket_text
from ..pages.figures import MUTED, look, panels, style
from .timeline import REFERENCES, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DECADES = 30
_MARKED = 40
"""Steps up to which each has a marker."""


def over_time(timeline: Timeline) -> Figure:
    """Reward, mismatch, what is kept, and length or staleness, by step."""
    with style():
        figure, axes = panels(2, 2, width=11.0, height=6.4)
        _line(axes[0], timeline, "reward", "mean reward")
        axes[0].set_title("Reward")
        _line(axes[1], timeline, "kl", "mismatch, KL(mu, pi_old)")
        _line(axes[1], timeline, "drift", "drift, mean |log pi / pi_old|", index=1)
        axes[1].set_title("Mismatch")
        axes[1].set_ylabel("nats a token")
        _nats_axis(axes[1], timeline)
        for index, (name, label) in enumerate(
            {"kept_tokens": "tokens kept", "kept_rows": "rows kept", "ess": "ESS of weight x keep"}.items()
        ):
            _line(axes[2], timeline, name, label, index=index)
        axes[2].set_title("What the recorded correction kept")
        _share_axis(axes[2])
        _line(axes[3], timeline, "length", "mean T")
        axes[3].set_title("Response length")
        axes[3].set_ylabel("tokens")
        if np.nanmax(timeline.column("staleness"), initial=0.0) > 0:
            other = axes[3].twinx()
            _line(other, timeline, "staleness", "staleness", index=1)
            other.grid(False)
            other.spines["right"].set_visible(True)
            other.set_ylabel("staleness, steps")
            axes[3].set_title("Response length and staleness")
        for axis in axes:
            _step_axis(axis, timeline)
        for axis in (axes[1], axes[2]):
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="best")
    return figure


def by_length(timeline: Timeline) -> Figure:
    """Share kept by length: of the recorded correction, and of two masks for comparison; and how many rows."""
    names = [bucket_text(entry.bucket) for entry in timeline.lengths]
    places = np.arange(len(names))
    with style():
        figure, (shares, counts) = panels(1, 2, width=11.0, height=3.6, width_ratios=(3, 1))
        lines = {
            "rows, recorded correction": [entry.kept_rows for entry in timeline.lengths],
            "tokens, recorded correction": [entry.kept_tokens for entry in timeline.lengths],
        }
        for key, meaning in REFERENCES.items():
            lines[f"rows, had {meaning} been on"] = [entry.references[key] for entry in timeline.lengths]
        for index, (label, values) in enumerate(lines.items()):
            style_of: dict[str, Any] = look(index) | ({"linestyle": "--"} if index >= 2 else {})
            shares.plot(places, values, label=label, clip_on=False, **style_of)
        shares.set_title("Share kept by length")
        shares.set_xticks(places, names)
        shares.set_xlabel("T, response tokens of a row")
        _share_axis(shares)
        shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        counts.bar(places, [entry.rows for entry in timeline.lengths], width=0.7, color=MUTED)
        counts.set_title("Rows")
        counts.set_xticks(places, names, rotation=30, ha="right")
        counts.margins(y=0.1)
    return figure


def _line(axis: Axes, timeline: Timeline, name: str, label: str, *, index: int = 0) -> None:
    values = timeline.column(name)
    known = np.isfinite(values)
    style_of = look(index)
    if len(values) > _MARKED:
        style_of = style_of | {"marker": ""}
    if known.any():
        axis.plot(timeline.column("step")[known], values[known], label=label, **style_of)
    else:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=MUTED)


def _share_axis(axis: Axes) -> None:
    """From a little below the least share to a little above 1."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.get_lines()] or [np.ones(1)])
    least = float(np.nanmin(values, initial=1.0))
    floor = max(0.0, np.floor((least - 0.02) * 20) / 20)
    axis.set_ylim(floor, 1 + 0.04 * (1 - floor))


def _nats_axis(axis: Axes, timeline: Timeline) -> None:
    """Logarithmic where powers of ten lie between its values."""
    values = np.concatenate([timeline.column("kl"), timeline.column("drift")])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size and values.max() > _DECADES * values.min():
        axis.set_yscale("log")
    else:
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))


def _step_axis(axis: Axes, timeline: Timeline) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(timeline.steps) == 1:
        only = timeline.steps[0].step
        axis.set_xlim(only - 1, only + 1)
