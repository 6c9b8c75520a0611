"""The picture of a study: what is kept by length, what it costs, by the values of the grid or by correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pages import figures
from .candidates import RECORDED, UNCORRECTED
from .results import Outcome, Study
from .show import heading, kept_by_group, short

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
    """A line for each spec and each value of the grid's other keys, along its key with most values; then the rest."""
    bases: dict[str, list[Outcome]] = {}
    for outcome in study.outcomes:
        if outcome.candidate.point:
            bases.setdefault(outcome.candidate.base, []).append(outcome)
    found = [line for outcomes in bases.values() for line in _of_base(outcomes)]
    rest = [outcome for outcome in study.outcomes if not outcome.candidate.point]
    if not found or any(outcome.candidate.label not in (UNCORRECTED, RECORDED) for outcome in rest):
        ticks = tuple(short(outcome.candidate.label) for outcome in rest)
        found.append(Line("", "", ticks, tuple(rest), ordered=False))
    return found


def _of_base(outcomes: Sequence[Outcome]) -> list[Line]:
    """The lines of one spec, whose points all have the same keys."""
    keys = list(outcomes[0].candidate.point)
    axis = max(keys, key=lambda key: len({outcome.candidate.point[key] for outcome in outcomes}))
    along: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        others = [f"{key}={value}" for key, value in outcome.candidate.point.items() if key != axis]
        along.setdefault(" ".join([outcome.candidate.base, *others]), []).append(outcome)
    return [_along(title, axis, several) for title, several in along.items()]


def draw(study: Study) -> Figure:
    """Four panels a line; what has no place in the grid is drawn as horizontal lines."""
    drawn = lines(study)[:MOST_LINES]
    level = [outcome for outcome in study.outcomes if outcome.candidate.label == UNCORRECTED]
    heights = [4.3 if line.ordered else 2.4 + 0.3 * len(line.ticks) for line in drawn]
    with figures.style():
        figure, axes = figures.panels(
            len(drawn), 4, width=17, height=sum(heights), gridspec_kw={"height_ratios": heights}
        )
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
    one = scale.axhline if line.ordered else scale.axvline
    one(1.0, color=figures.MUTED, linewidth=1, linestyle=":")
    _fields(bias, line, _BIAS)
    for outcome in level:
        _mark(bias, outcome)
    overall.set_title("Kept and effective sample")
    scale.set_title("Effective learning rate")
    bias.set_title("Distance from unbiased weights")
    for place, panel in enumerate(axes):
        if not line.ordered:
            panel.tick_params(labelleft=place == 0)
        if panel.get_legend_handles_labels()[0]:
            # Single points are hard to see behind a legend.
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 3 if place == 0 else 2}
            panel.legend(**({"loc": "best"} if line.ordered else below))
        _limits(panel, line, share=place < 2)


def _mark(axes: Axes, uncorrected: Outcome) -> None:
    """Level lines, in the colours of the two references."""
    for name, colour in (("bias_token", figures.PALETTE[0]), ("bias_sequence", figures.PALETTE[2])):
        if (value := getattr(uncorrected.overall, name)) is not None:
            axes.axhline(value, color=colour, linewidth=1, linestyle=":")
            axes.annotate(
                "uncorrected", (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8,
                color=colour,
            )  # fmt: skip


def _by_group(axes: Axes, line: Line) -> None:
    shares = [kept_by_group(outcome) for outcome in line.outcomes]
    names = [name for name in shares[0] if name.startswith("length/")]
    if len(names) < 2:
        names = list(shares[0])
    for place, name in enumerate(names):
        _plot(axes, line, [share.get(name) for share in shares], heading(name), place)
    axes.set_title(f"Tokens kept by {'length T' if names[-1].startswith('length/') else 'group'}")
    axes.set_ylabel(line.title, color=figures.INK)


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
    positions = range(len(numbers))
    if line.ordered:
        axes.plot(positions, numbers, label=label, clip_on=False, **look | ({"linestyle": "--"} if dashed else {}))
        axes.set_xticks(positions, line.ticks)
        axes.set_xlim(-0.4, len(numbers) - 0.6)
        axes.set_xlabel(line.label)
    else:
        axes.plot(numbers, positions, label=label, clip_on=False, **look | {"linestyle": "none"})
        axes.set_yticks(positions, line.ticks)
        axes.set_ylim(len(numbers) - 0.5, -0.5)


def _limits(axes: Axes, line: Line, *, share: bool) -> None:
    """Shares from a little below the least one to 1, other values from 0."""
    data = [one.get_ydata() if line.ordered else one.get_xdata() for one in axes.get_lines()]
    values = [value for one in data for value in _numbers(one) if not math.isnan(value)]
    least, greatest = min(values, default=0.0), max(values, default=1.0)
    if share:
        low = max(0.0, math.floor((least - 0.03) * 20) / 20)
        high = 1 + 0.03 * (1 - low)
    else:
        low, high = min(0.0, least), greatest * 1.08 if greatest > 0 else 1.0
    (axes.set_ylim if line.ordered else axes.set_xlim)(low, high)


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
