"""Figures of a report: over time and by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..calibration.calibration_tables import format_bucket
from ..pages.panels import Axis, Mark, Panel, limit_shares, style_line
from ..pages.plotting import MUTED, Series, merge_equal_series
from .timeline import REFERENCES, Timeline

_DECADES = 30
_HAD = "had"
"""What the names of masks begin with that did not act; their lines are dashed."""
_MARKED = 40
"""Steps up to which each has a marker."""
_KEPT = {"tokens kept": "kept_tokens", "rows kept": "kept_rows", "ESS of weight x keep": "ess"}
_MISMATCH = {"mismatch, KL(mu, pi_old)": "kl", "drift, mean |log pi / pi_old|": "drift"}
_LENGTH = {"all answers": "length", "right answers": "length_right", "wrong answers": "length_wrong"}


def build_step_panels(timeline: Timeline) -> list[Panel]:
    """Build the panels of reward, mismatch, kept shares, length, and staleness where there is any, by step."""
    graded = all(np.isfinite(timeline.get_column(name)).any() for name in ("length_right", "length_wrong"))
    lengths = _LENGTH if graded else {"": "length"}
    kept = _plot(timeline, "What the recorded correction kept", "Shares kept and effective sample size", "share", _KEPT)
    panels = [
        _plot(timeline, "Reward", "Mean reward", "mean reward of a response", {"": "reward"}),
        _limit_nats(_plot(timeline, "Mismatch", "KL(mu, pi_old) and drift", "nats a token", _MISMATCH)),
        replace(kept, y=limit_shares(kept.y, kept.marks)),
        _plot(timeline, "Response length", "Response length", "mean T, tokens", lengths),
    ]
    if timeline.is_stale:
        panels.append(_plot(timeline, "Staleness", "Staleness", "mean age of a row, steps", {"": "staleness"}))
    return panels


def build_length_panels(timeline: Timeline) -> list[Panel]:
    """Build the panels of kept share by length, with two reference masks, and of row counts."""
    entries = timeline.lengths
    x = Axis("T, response tokens of a row", ticks={at: format_bucket(one.bucket) for at, one in enumerate(entries)})
    lines: dict[str, Series] = {
        "rows kept": [one.kept_rows for one in entries],
        "tokens kept": [one.kept_tokens for one in entries],
    }
    for key, meaning in REFERENCES.items():
        lines[f"{_HAD} {meaning} been on: rows kept"] = [one.references[key] for one in entries]
    places = range(len(entries))
    shares = [
        Mark(places, values, label, **style_line(at) | ({"dash": "--"} if label.startswith(_HAD) else {}))
        for at, (label, values) in enumerate(merge_equal_series(lines).items())
    ]
    alt = "Share of rows and tokens kept by response length"
    rows = Mark(places, [one.rows for one in entries], colour=MUTED, bar=0.7)
    return [
        Panel("Share kept by length", alt, x, limit_shares(Axis("share"), shares), shares, columns=1),
        Panel("Rows by length", "Rows by response length", x, Axis("rows"), [rows]),
    ]


def _plot(timeline: Timeline, title: str, shown: str, unit: str, names: Mapping[str, str]) -> Panel:
    """Plot columns of a timeline, equal ones as one line; one that was not recorded is named so."""
    steps = timeline.get_column("step")
    columns: dict[str, Series] = {label: timeline.get_column(name) for label, name in names.items()}
    marks = []
    for at, (label, values) in enumerate(merge_equal_series(columns).items()):
        known = np.isfinite(values)
        if known.any():
            look = style_line(at, marker=len(steps) <= _MARKED)
            marks.append(Mark(steps[known], np.asarray(values)[known], label, **look))
    missing = "" if len(marks) == len(merge_equal_series(columns)) else "not recorded"
    limits = (steps[0] - 1, steps[0] + 1) if len(steps) == 1 else None
    return Panel(title, f"{shown} by step", Axis("step", form="whole", limits=limits), Axis(unit), marks, missing)


def _limit_nats(panel: Panel) -> Panel:
    """Make the axis logarithmic where its values span powers of ten."""
    values = np.concatenate([np.asarray(mark.y) for mark in panel.marks if isinstance(mark, Mark)] or [np.zeros(0)])
    values = values[values > 0]
    wide = values.size and values.max() > _DECADES * values.min()
    return replace(panel, y=Axis(panel.y.label, log=10)) if wide else panel
