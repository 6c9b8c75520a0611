"""Figures of a report: over time and by length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..calibration.calibration_tables import format_bucket
from ..pages.plotting import MUTED, FigurePanel, Series, add_legend, get_line_style, merge_equal_series
from .timeline import REFERENCES, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DECADES = 30
_HAD = "had"
"""What the names of masks begin with that did not act; their lines are dashed."""
_MARKED = 40
"""Steps up to which each has a marker."""


def build_step_panels(timeline: Timeline) -> list[FigurePanel]:
    """Build the panels of reward, mismatch, kept shares, length, and staleness where there is any, by step."""
    functions = {
        "Mean reward by step": _reward,
        "KL(mu, pi_old) and drift by step": _mismatch,
        "Shares kept and effective sample size by step": _kept,
        "Response length by step": _length,
    }
    if timeline.is_stale:
        functions["Staleness by step"] = _staleness
    return [FigurePanel(partial(_by_step, timeline=timeline, function=one), alt) for alt, one in functions.items()]


def build_length_panels(timeline: Timeline) -> list[FigurePanel]:
    """Build the panels of kept share by length, with two reference masks, and of row counts."""
    return [
        FigurePanel(partial(_shares, timeline=timeline), "Share of rows and tokens kept by response length"),
        FigurePanel(partial(_rows, timeline=timeline), "Rows by response length"),
    ]


def _by_step(axis: Axes, *, timeline: Timeline, function: Callable[[Axes, Timeline], None]) -> None:
    function(axis, timeline)
    _step_axis(axis, timeline)
    add_legend(axis)


def _reward(axis: Axes, timeline: Timeline) -> None:
    axis.set_title("Reward")
    axis.set_ylabel("mean reward of a response")
    _line(axis, timeline, {"": timeline.get_column("reward")})


def _mismatch(axis: Axes, timeline: Timeline) -> None:
    axis.set_title("Mismatch")
    axis.set_ylabel("nats a token")
    lines = {
        "mismatch, KL(mu, pi_old)": timeline.get_column("kl"),
        "drift, mean |log pi / pi_old|": timeline.get_column("drift"),
    }
    _line(axis, timeline, lines)
    _nats_axis(axis, timeline)


def _kept(axis: Axes, timeline: Timeline) -> None:
    axis.set_title("What the recorded correction kept")
    axis.set_ylabel("share")
    names = {"tokens kept": "kept_tokens", "rows kept": "kept_rows", "ESS of weight x keep": "ess"}
    _line(axis, timeline, merge_equal_series({label: timeline.get_column(name) for label, name in names.items()}))
    _share_axis(axis)


def _length(axis: Axes, timeline: Timeline) -> None:
    axis.set_title("Response length")
    axis.set_ylabel("mean T, tokens")
    names = {"all answers": "length", "right answers": "length_right", "wrong answers": "length_wrong"}
    lines = {label: timeline.get_column(name) for label, name in names.items()}
    graded = all(np.isfinite(lines[f"{name} answers"]).any() for name in ("right", "wrong"))
    _line(axis, timeline, lines if graded else {"": lines["all answers"]})


def _staleness(axis: Axes, timeline: Timeline) -> None:
    axis.set_title("Staleness")
    axis.set_ylabel("mean age of a row, steps")
    _line(axis, timeline, {"": timeline.get_column("staleness")})


def _shares(axis: Axes, *, timeline: Timeline) -> None:
    names = [format_bucket(entry.bucket) for entry in timeline.lengths]
    places = np.arange(len(names))
    lines: dict[str, Series] = {
        "rows kept": [entry.kept_rows for entry in timeline.lengths],
        "tokens kept": [entry.kept_tokens for entry in timeline.lengths],
    }
    for key, meaning in REFERENCES.items():
        lines[f"{_HAD} {meaning} been on: rows kept"] = [entry.references[key] for entry in timeline.lengths]
    for index, (label, values) in enumerate(merge_equal_series(lines).items()):
        dashed = {"linestyle": "--"} if label.startswith(_HAD) else {}
        axis.plot(places, values, label=label, clip_on=False, **(get_line_style(index) | dashed))
    axis.set_title("Share kept by length")
    axis.set_ylabel("share")
    axis.set_xticks(places, names)
    axis.set_xlabel("T, response tokens of a row")
    _share_axis(axis)
    add_legend(axis, columns=1)


def _rows(axis: Axes, *, timeline: Timeline) -> None:
    names = [format_bucket(entry.bucket) for entry in timeline.lengths]
    places = np.arange(len(names))
    axis.bar(places, [entry.rows for entry in timeline.lengths], width=0.7, color=MUTED)
    axis.set_title("Rows by length")
    axis.set_ylabel("rows")
    axis.set_xticks(places, names)
    axis.set_xlabel("T, response tokens of a row")
    axis.margins(y=0.1)


def _line(axis: Axes, timeline: Timeline, lines: Mapping[str, Series]) -> None:
    """Plot one line a series; a series that was not recorded is named so."""
    steps = timeline.get_column("step")
    for index, (label, series) in enumerate(lines.items()):
        values = np.asarray(series)
        known = np.isfinite(values)
        style_of = get_line_style(index) | ({"marker": ""} if len(values) > _MARKED else {})
        if known.any():
            axis.plot(steps[known], values[known], label=label, **style_of)
        else:
            axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=MUTED)


def _share_axis(axis: Axes) -> None:
    """Limit the axis from a little below the least share to a little above 1."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.get_lines()] or [np.ones(1)])
    least = float(np.nanmin(values, initial=1.0))
    floor = max(0.0, np.floor((least - 0.02) * 20) / 20)
    axis.set_ylim(floor, 1 + 0.04 * (1 - floor))


def _nats_axis(axis: Axes, timeline: Timeline) -> None:
    """Make the axis logarithmic where its values span powers of ten."""
    values = np.concatenate([timeline.get_column("kl"), timeline.get_column("drift")])
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
