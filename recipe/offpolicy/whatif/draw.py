"""The picture of a study: what is kept by length, what it costs, by the values of the grid or by correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pages import figures
from .candidates import RECORDED, UNCORRECTED
from .show import heading, kept_by_group, short
from .study import Outcome, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 4
"""Lines of panels; more corrections than these hold are in the tables alone."""
_KEPT = {"kept_tokens": "tokens kept", "kept_rows": "rows kept", "ess": "ESS of weight x keep"}
_SCALE = {"lr_scale": "learning-rate scale", "projection": "projection"}
_BIAS = {
    "bias_token": "by token",
    "bias_token_systematic": "by token, of it shift",
    "bias_sequence": "by row",
    "bias_sequence_systematic": "by row, of it shift",
}

_DASHED = ("ess", "projection", "bias_token_systematic", "bias_sequence_systematic")


@dataclass(frozen=True)
class Line:
    """One line of panels.

    Attributes:
        title: what its corrections have in common.
        label: of the horizontal axis.
        ticks: a text for each correction.
        outcomes: in the order of the axis.
        ordered: whether the axis is that of a number.
    """

    title: str
    label: str
    ticks: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    ordered: bool


def lines(study: Study) -> list[Line]:
    """A line for each spec and each value of the grid's other keys, along the key with most values; then the rest."""
    gridded = [outcome for outcome in study.outcomes if outcome.candidate.point]
    found = []
    if gridded:
        values: dict[str, set[str]] = {}
        for outcome in gridded:
            for key, value in outcome.candidate.point.items():
                values.setdefault(key, set()).add(value)
        axis = max(values, key=lambda key: len(values[key]))
        along: dict[str, list[Outcome]] = {}
        for outcome in gridded:
            others = [f"{key}={value}" for key, value in outcome.candidate.point.items() if key != axis]
            along.setdefault(" ".join([outcome.candidate.base, *others]), []).append(outcome)
        found = [_along(title, axis, outcomes) for title, outcomes in along.items()]
    rest = [outcome for outcome in study.outcomes if not outcome.candidate.point]
    plain = {UNCORRECTED, RECORDED}
    if not gridded or any(outcome.candidate.label not in plain for outcome in rest):
        ticks = tuple(short(outcome.candidate.label) for outcome in rest)
        found.append(Line("", "", ticks, tuple(rest), ordered=False))
    return found


def draw(study: Study) -> Figure:
    """Four panels a line; what has no place in the grid is drawn as horizontal lines."""
    drawn = lines(study)[:MOST_LINES]
    level = [outcome for outcome in study.outcomes if outcome.candidate.label == UNCORRECTED]
    with figures.style():
        figure, axes = figures.panels(len(drawn), 4, width=17, height=4.3 * len(drawn))
        for place, line in enumerate(drawn):
            _line(line, level if line.ordered else [], axes[4 * place : 4 * place + 4])
        figure.suptitle(_title(study, len(drawn)), x=0.01, ha="left", fontsize=11, color=figures.MUTED)
    return figure


def save(figure: Figure, path: Path) -> None:
    figures.save(figure, path)


def _line(line: Line, level: Sequence[Outcome], axes: Sequence[Axes]) -> None:
    kept, overall, scale, bias = axes
    _by_group(kept, line)
    _fields(overall, line, _KEPT)
    _fields(scale, line, _SCALE)
    scale.axhline(1.0, color=figures.MUTED, linewidth=1, linestyle=":")
    _fields(bias, line, _BIAS)
    for outcome in level:
        for place, name in enumerate(("bias_token", "bias_sequence")):
            if (value := getattr(outcome.overall, name)) is not None:
                colour = figures.PALETTE[2 * place]
                bias.axhline(value, color=colour, linewidth=1, linestyle=":")
                bias.annotate(
                    "uncorrected", (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8,
                    color=colour,
                )  # fmt: skip
    overall.set_title("Kept and effective sample")
    scale.set_title("Effective learning rate")
    bias.set_title("Distance from unbiased weights")
    _shares(kept)
    _shares(overall)
    for one in (scale, bias):
        one.set_ylim(bottom=min(0.0, one.get_ylim()[0]))
        one.margins(y=0.15)
        one.legend(loc="best")


def _by_group(axes: Axes, line: Line) -> None:
    shares = [kept_by_group(outcome) for outcome in line.outcomes]
    names = [name for name in shares[0] if name.startswith("length/")]
    if len(names) < 2:
        names = list(shares[0])
    for place, name in enumerate(names):
        _plot(axes, line, [share.get(name) for share in shares], heading(name), place)
    title = "length T" if len(names) > 1 and names[-1].startswith("length/") else "group"
    axes.set_title(f"Tokens kept by {title}{f', {line.title}' if line.title else ''}")


def _fields(axes: Axes, line: Line, names: dict[str, str]) -> None:
    for place, (name, label) in enumerate(names.items()):
        values = [getattr(outcome.overall, name) for outcome in line.outcomes]
        if any(value is not None for value in values):
            _plot(axes, line, values, label, place, dashed=name in _DASHED)


def _plot(
    axes: Axes, line: Line, values: Sequence[float | None], label: str, place: int, *, dashed: bool = False
) -> None:
    numbers = [math.nan if value is None else value for value in values]
    look: dict[str, Any] = figures.look(place)
    if dashed:
        look["linestyle"] = "--"
    if not line.ordered:
        look["linestyle"] = "none"
    axes.plot(range(len(numbers)), numbers, label=label, clip_on=False, **look)
    rotation = 0 if line.ordered and max(map(len, line.ticks)) * len(line.ticks) < 40 else 25
    axes.set_xticks(range(len(line.ticks)), line.ticks, rotation=rotation, ha="right" if rotation else "center")
    axes.set_xlim(-0.4, len(line.ticks) - 0.6)
    axes.set_xlabel(line.label)


def _shares(axes: Axes) -> None:
    """Room for what differs: from the least share to 1."""
    values = [float(value) for line in axes.get_lines() for value in _numbers(line.get_ydata())]
    least = min((value for value in values if not math.isnan(value)), default=0.0)
    floor = max(0.0, math.floor((least - 0.03) * 20) / 20)
    axes.set_ylim(floor, 1 + 0.03 * (1 - floor))
    axes.legend(loc="best")


def _numbers(data: Any) -> list[float]:
    return [float(value) for value in data]


def _along(title: str, axis: str, outcomes: Sequence[Outcome]) -> Line:
    def number(outcome: Outcome) -> float:
        try:
            return float(outcome.candidate.point[axis])
        except ValueError:
            return math.inf

    ordered = sorted(outcomes, key=number)
    ticks = tuple(outcome.candidate.point[axis] for outcome in ordered)
    return Line(short(title), short(axis), ticks, tuple(ordered), ordered=True)


def _title(study: Study, drawn: int) -> str:
    steps = f"steps {study.steps[0]} to {study.steps[-1]}" if len(study.steps) > 1 else f"step {study.steps[0]}"
    left = len(lines(study)) - drawn
    more = f"; {left} more lines of panels are in the tables alone" if left else ""
    return f"{study.directory}: {steps}, {study.rows:,} rows, {study.tokens:,} tokens{more}"
