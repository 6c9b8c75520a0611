"""Figures of a study: kept shares and their cost, by the values of the grid or by correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pages import plotting
from ..pages.plotting import FigurePanel
from .candidates import RECORDED, UNCORRECTED
from .outcomes import CorrectionOutcome, Study
from .whatif_tables import collect_kept_shares, list_groups, shorten_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 4
"""Lines of panels; more corrections than these hold are in the tables alone."""
_MOST_TICKS = 8
"""Values of a grid whose texts find room below a panel."""
_KEPT = {
    "kept_tokens": "tokens kept",
    "kept_rows": "rows kept",
    "ess": "ESS of weight x keep",
    "mismatch_left": "mismatch left",
}
_SCALE = {"lr_scale": "learning-rate scale", "projection": "projection"}
_BIAS = {
    "bias_token": "by token",
    "bias_token_systematic": "by token, of it shift",
    "bias_sequence": "by row",
    "bias_sequence_systematic": "by row, of it shift",
}


@dataclass(frozen=True)
class PanelRow:
    """One row of panels: corrections along one axis.

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
    outcomes: tuple[CorrectionOutcome, ...]
    ordered: bool


def group_into_rows(study: Study) -> list[PanelRow]:
    """Group the corrections into rows: one for each spec and value of the other keys; the rest in the last.

    The axis is the grid's key with most values.
    """
    bases: dict[str, list[CorrectionOutcome]] = {}
    for outcome in study.outcomes:
        if outcome.candidate.point:
            bases.setdefault(outcome.candidate.base, []).append(outcome)
    found = [line for outcomes in bases.values() for line in _of_base(outcomes)]
    rest = [outcome for outcome in study.outcomes if not outcome.candidate.point]
    if not found or any(outcome.candidate.label not in (UNCORRECTED, RECORDED) for outcome in rest):
        ticks = tuple(shorten_label(outcome.candidate.label) for outcome in rest)
        found.append(PanelRow("", "", ticks, tuple(rest), ordered=False))
    return found


def _of_base(outcomes: Sequence[CorrectionOutcome]) -> list[PanelRow]:
    """Build the rows of one spec, whose points all have the same keys."""
    keys = list(outcomes[0].candidate.point)
    axis = max(keys, key=lambda key: len({outcome.candidate.point[key] for outcome in outcomes}))
    along: dict[str, list[CorrectionOutcome]] = {}
    for outcome in outcomes:
        others = [f"{key}={value}" for key, value in outcome.candidate.point.items() if key != axis]
        along.setdefault(" ".join([outcome.candidate.base, *others]), []).append(outcome)
    return [_along(title, axis, several) for title, several in along.items()]


def draw_study(study: Study) -> Figure:
    """Draw all panels into one figure, two beside one another; off-grid corrections are horizontal lines."""
    drawn = build_panels(study)
    return plotting.draw_panels([panel for line in drawn for panel in line], columns=2, title=_title(study, len(drawn)))


def build_panels(study: Study) -> list[list[FigurePanel]]:
    """Build the four panels of each row."""
    level = [outcome for outcome in study.outcomes if outcome.candidate.label == UNCORRECTED]
    return [_panels(line, level if line.ordered else []) for line in group_into_rows(study)[:MOST_LINES]]


def save(figure: Figure, path: Path) -> None:
    plotting.save(figure, path)


def _panels(line: PanelRow, level: Sequence[CorrectionOutcome]) -> list[FigurePanel]:
    height = 4.2 if line.ordered else 2.0 + 0.3 * len(line.ticks)
    functions: dict[str, Callable[[Axes, PanelRow], None]] = {
        "Share of tokens kept by length of the row or group": _by_group,
        "Share kept, mismatch left and effective sample size": _kept,
        "Learning-rate scale and projection": _scale,
        "Distance from unbiased weights": partial(_bias, level=level),
    }
    return [FigurePanel(partial(_panel, line=line, function=one), alt, height) for alt, one in functions.items()]


def _panel(axes: Axes, *, line: PanelRow, function: Callable[[Axes, PanelRow], None]) -> None:
    function(axes, line)
    if line.title:
        axes.set_title(f"{axes.get_title(loc='left')}, {line.title}", loc="left")
    plotting.add_legend(axes)


def _kept(axes: Axes, line: PanelRow) -> None:
    axes.set_title("Kept and effective sample")
    if line.ordered:
        axes.set_ylabel("share")
    _fields(axes, line, _KEPT)
    _limits(axes, line, share=True)


def _scale(axes: Axes, line: PanelRow) -> None:
    axes.set_title("Effective learning rate")
    if line.ordered:
        axes.set_ylabel("share of the uncorrected one")
    _fields(axes, line, _SCALE)
    (axes.axhline if line.ordered else axes.axvline)(1.0, color=plotting.MUTED, linewidth=1, linestyle=":")
    _limits(axes, line, share=False)


def _bias(axes: Axes, line: PanelRow, level: Sequence[CorrectionOutcome]) -> None:
    axes.set_title("Distance from unbiased weights")
    if line.ordered:
        axes.set_ylabel("relative distance")
    _fields(axes, line, _BIAS)
    for outcome in level:
        _mark(axes, outcome)
    _limits(axes, line, share=False)


def _mark(axes: Axes, uncorrected: CorrectionOutcome) -> None:
    """Draw level lines of the uncorrected replay, in the colours of the two references."""
    for name, colour in (("bias_token", plotting.PALETTE[0]), ("bias_sequence", plotting.PALETTE[2])):
        if (value := getattr(uncorrected.overall, name)) is not None:
            axes.axhline(value, color=colour, linewidth=1, linestyle=":")
            axes.annotate(
                "uncorrected", (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8,
                color=colour,
            )  # fmt: skip


def _by_group(axes: Axes, line: PanelRow) -> None:
    """Plot kept shares by length; where all rows are of one length, by the groups that split the tokens."""
    names = list_groups(line.outcomes[0])
    lengths = [name for name in names if name.startswith("length/")]
    if len(lengths) < 2:
        lengths = [name for name in names if name not in lengths] or lengths
    shares = [collect_kept_shares(outcome) for outcome in line.outcomes]
    _series(axes, line, {names[name]: [share.get(name) for share in shares] for name in lengths})
    by_length = all(name.startswith("length/") for name in lengths)
    axes.set_title(f"Tokens kept by {'length T' if by_length else 'group'}")
    if line.ordered:
        axes.set_ylabel("share of the group's tokens")
    _limits(axes, line, share=True)


def _fields(axes: Axes, line: PanelRow, names: dict[str, str]) -> None:
    series = {label: [getattr(outcome.overall, name) for outcome in line.outcomes] for name, label in names.items()}
    _series(axes, line, series)


def _series(axes: Axes, line: PanelRow, series: Mapping[str, Sequence[float | None]]) -> None:
    known = {label: values for label, values in series.items() if any(value is not None for value in values)}
    numbers: dict[str, plotting.Series] = {
        label: [math.nan if value is None else value for value in values] for label, values in known.items()
    }
    for place, (label, values) in enumerate(plotting.merge_equal_series(numbers).items()):
        look = plotting.get_line_style(place)
        positions = range(len(values))
        if line.ordered:
            axes.plot(positions, values, label=label, clip_on=False, **look)
            # Ceiling division.
            every = -(-len(values) // _MOST_TICKS)
            axes.set_xticks(positions[::every], line.ticks[::every])
            axes.set_xlim(-0.4, len(values) - 0.6)
            axes.set_xlabel(line.label)
        else:
            axes.plot(values, positions, label=label, clip_on=False, **look | {"linestyle": "none"})
            axes.set_yticks(positions, line.ticks)
            axes.set_ylim(len(values) - 0.5, -0.5)


def _limits(axes: Axes, line: PanelRow, *, share: bool) -> None:
    """Limit shares from a little below the least one to 1, other values from 0."""
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


def _along(title: str, axis: str, outcomes: Sequence[CorrectionOutcome]) -> PanelRow:
    def number(outcome: CorrectionOutcome) -> float:
        try:
            return float(outcome.candidate.point[axis])
        except ValueError:
            # Values that are no numbers, such as null, stand last.
            return math.inf

    ordered = sorted(outcomes, key=number)
    ticks = tuple(outcome.candidate.point[axis] for outcome in ordered)
    return PanelRow(
        _in_words(shorten_label(title)), _name_key(shorten_label(axis)), ticks, tuple(ordered), ordered=True
    )


def _in_words(correction: str) -> str:
    """Write ``[tis_token,gsm] weight.upper=2`` as ``tis_token and gsm, upper bound of weight = 2``."""
    options, *keys = correction.split(" ")
    named = [f"{_name_key(key)} = {value}" for key, _, value in (each.partition("=") for each in keys)]
    return ", ".join([" and ".join(options.strip("[]").split(",")), *named])


def _name_key(key: str) -> str:
    """Write ``masks.gsm.upper`` as ``upper bound of gsm``; other keys stay as they are."""
    *owner, name = key.split(".")
    known = {"upper": "upper bound", "lower": "lower bound", "delta": "delta", "budget": "budget"}
    return f"{known[name]} of {owner[-1]}" if owner and name in known else key


def _title(study: Study, drawn: int) -> str:
    steps = f"steps {study.steps[0]} to {study.steps[-1]}" if len(study.steps) > 1 else f"step {study.steps[0]}"
    left = len(group_into_rows(study)) - drawn
    more = f"; {left} more lines of panels are in the tables alone" if left else ""
    return f"{study.directory}: {steps}, {study.rows:,} rows, {study.tokens:,} tokens{more}"
