"""Panels as values: marks on one pair of axes, drawn into a picture by matplotlib or onto a page by Bokeh."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .plotting import INK, MUTED, PALETTE, Series, add_legend, get_line_style
from .template import render_template

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes

_DASHES = {"-": "solid", "--": "dashed", "-.": "dotdash", ":": "dotted"}
_MARKERS = dict(
    zip("osD^vPX", ("circle", "square", "diamond", "triangle", "inverted_triangle", "plus", "x"), strict=True)
)
_PIXELS = 90
"""Pixels on a page per inch of a panel's height."""


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Attributes:
        log: base of a logarithmic scale; 0 for a linear one.
        limits: ends of the axis, with the larger end first if the axis points down or left; None to choose them from
            the marks.
        ticks: labels by position; if empty, the ticks are numbers.
        form: format of the numbers.
    """

    label: str = ""
    log: int = 0
    limits: tuple[float, float] | None = None
    ticks: Mapping[int, str] = field(default_factory=dict)
    form: Literal["", "percent", "whole"] = ""


@dataclass(frozen=True)
class Mark:
    """A line with its markers, or bars.

    Attributes:
        x, y: coordinates, (n,) each; NaN for a missing value.
        band: lower and upper ends of intervals, (n,) each.
        dash: dash pattern of the line; empty for only markers.
        bar: width of bars from ``base``; 0 for a line.
    """

    x: Series | Sequence[str]
    y: Series
    label: str = ""
    colour: str = PALETTE[0]
    band: tuple[Series, Series] | None = None
    dash: str = "-"
    marker: str = ""
    thick: float = 1.8
    bar: float = 0.0
    base: Series | float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True)
class Rule:
    """A line across a panel at a value of one axis; if ``end`` is set, the range from the value to ``end``."""

    at: float
    across: Literal["x", "y"]
    label: str = ""
    colour: str = MUTED
    dash: str = ":"
    thick: float = 1.0
    end: float | None = None


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        alt: what the panel shows, for readers who cannot see it.
        note: text that is shown instead of marks.
        height: height in a picture, in inches; the width is ``plotting.PANEL_WIDTH``.
    """

    title: str
    alt: str
    x: Axis
    y: Axis
    marks: Sequence[Mark | Rule] = ()
    note: str = ""
    height: float = 3.8
    columns: int = 2

    def draw(self, axes: Axes) -> None:
        """Draw onto axes of matplotlib."""
        axes.set_title(self.title)
        if self.note:
            axes.text(0.5, 0.5, self.note, ha="center", va="center", color=MUTED, transform=axes.transAxes)
        if self.note and not self.marks:
            axes.set_axis_off()
            return
        for mark in self.marks:
            _draw_mark(axes, mark) if isinstance(mark, Mark) else _draw_rule(axes, mark)
        for name, axis in (("x", self.x), ("y", self.y)):
            _set_axis(axes, name, axis)
        add_legend(axes, columns=self.columns)

    def build(self) -> Any:
        """Build the Bokeh figure, which supports zooming, hiding lines and reading off values."""
        from bokeh.models.annotations import Label
        from bokeh.plotting import figure

        types: Any = {
            f"{name}_axis_type": "log" if axis.log else "linear" for name, axis in (("x", self.x), ("y", self.y))
        }
        ranges: Any = {f"{name}_range": axis.limits for name, axis in (("x", self.x), ("y", self.y)) if axis.limits}
        found: Any = figure(
            title=self.title, height=int(_PIXELS * self.height), sizing_mode="stretch_width",
            tools="pan,box_zoom,wheel_zoom,reset,save", active_scroll=None, toolbar_location="above", **types, **ranges,
        )  # fmt: skip
        found.toolbar.logo = None
        for mark in self.marks:
            _build_mark(found, mark) if isinstance(mark, Mark) else _build_rule(found, mark)
        if self.note:
            found.add_layout(Label(x=40, y=40, x_units="screen", y_units="screen", text=self.note, text_color=MUTED))
        for axis, of in ((found.xaxis, self.x), (found.yaxis, self.y)):
            axis.axis_label = of.label
            if of.ticks:
                axis.ticker, axis.major_label_overrides = list(of.ticks), dict(of.ticks)
            elif of.form == "percent":
                axis.formatter = _percent()
        if found.legend:
            found.add_layout(found.legend[0], "below")
            found.legend.click_policy, found.legend.ncols, found.legend.label_text_font_size = (
                "hide",
                self.columns,
                "9pt",
            )
        return found


def style_line(index: int, *, marker: bool = True) -> dict[str, Any]:
    """Return colour, dashes and marker of the index-th line of a panel, as fields of a ``Mark``."""
    look = get_line_style(index)
    return {"colour": look["color"], "dash": look["linestyle"], "marker": look["marker"] if marker else ""}


def render_panels(panels: Sequence[Panel]) -> Markup:
    """Render interactive panels separately, so that they stack on a narrow screen."""
    from markupsafe import Markup

    # A closing tag in a string would end the script that contains it.
    items = [{"alt": panel.alt, "content": Markup(serialize(panel).replace("<", "\\u003c"))} for panel in panels]
    return render_template("panels", panels=items)


def serialize(panel: Panel) -> str:
    """Serialize Bokeh's figure of a panel as JSON, the same for equal panels."""
    from bokeh.embed import json_item

    content = json.dumps(json_item(panel.build()))
    # Bokeh numbers its models consecutively across figures.
    ids = dict.fromkeys(re.findall(r'"id": "(p\d+)"', content))
    numbers = {name: f"p{place}" for place, name in enumerate(ids)}
    return re.sub(r'(?<=")p\d+(?=")', lambda found: numbers.get(found[0], found[0]), content)


def _draw_mark(axes: Axes, mark: Mark) -> None:
    x: Any = mark.x
    if mark.bar:
        error = None if mark.band is None else np.abs(np.asarray(mark.band) - np.asarray(mark.y)).tolist()
        look: Any = {"color": mark.colour, "alpha": mark.alpha, "ecolor": INK}
        axes.bar(x, mark.y, mark.bar, mark.base, label=mark.label, yerr=error, **look)
        return
    dash = mark.dash or "none"
    axes.plot(
        x, mark.y, color=mark.colour, linestyle=dash, marker=mark.marker, linewidth=mark.thick, label=mark.label,
        clip_on=mark.band is not None or not mark.marker,
    )  # fmt: skip
    if mark.band is not None:
        axes.fill_between(x, *mark.band, color=mark.colour, alpha=0.18, linewidth=0)


def _draw_rule(axes: Axes, rule: Rule) -> None:
    if rule.end is not None:
        (axes.axvspan if rule.across == "x" else axes.axhspan)(
            rule.at, rule.end, color=rule.colour, alpha=0.15, linewidth=0, label=rule.label or None
        )  # fmt: skip
        return
    draw = axes.axvline if rule.across == "x" else axes.axhline
    draw(rule.at, color=rule.colour, linewidth=rule.thick, linestyle=rule.dash, label=rule.label or None)


def _set_axis(axes: Axes, name: str, axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    getattr(axes, f"set_{name}label")(axis.label)
    own: Any = getattr(axes, f"{name}axis")
    if axis.log:
        getattr(axes, f"set_{name}scale")("log", base=axis.log)
    if axis.limits is not None:
        getattr(axes, f"set_{name}lim")(*axis.limits)
    if axis.log:
        first, last = getattr(axes, f"get_{name}lim")()
        # If the range is short, there are also ticks at 2 and 5 between powers of ten.
        parts = (1.0, 2.0, 5.0) if axis.log == 10 and last < 100 * first else (1.0,)
        own.set_major_locator(LogLocator(axis.log, parts, numticks=12))
        own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        own.set_minor_formatter(NullFormatter())
    elif axis.ticks:
        getattr(axes, f"set_{name}ticks")(list(axis.ticks), list(axis.ticks.values()))
    elif axis.form == "percent":
        own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    elif axis.form == "whole":
        own.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _build_mark(found: Any, mark: Mark) -> None:
    x, y = np.asarray(mark.x), np.asarray(mark.y, dtype=float)
    legend = {"legend_label": mark.label} if mark.label else {}
    low, high = (None, None) if mark.band is None else (np.asarray(end, dtype=float) for end in mark.band)
    if mark.bar:
        shown = [found.vbar(x, mark.bar, mark.base + y, mark.base, color=mark.colour, alpha=mark.alpha, **legend)]
        if low is not None:
            found.segment(x, low, x, high, color=INK)
    else:
        shown = []
        if low is not None:
            found.varea(x, low, high, color=mark.colour, alpha=0.18, **legend)
        if mark.dash:
            look = {"line_dash": _DASHES[mark.dash], "line_width": mark.thick}
            shown.append(found.line(x, y, color=mark.colour, **look, **legend))
        if mark.marker:
            shown.append(found.scatter(x, y, marker=_MARKERS[mark.marker], size=7, color=mark.colour, **legend))
    _add_hover(found, shown[-1:], [(mark.label or "value", f"@{'top' if mark.bar else 'y'}"), ("at", "@x")])


def _build_rule(found: Any, rule: Rule) -> None:
    legend = {"legend_label": rule.label} if rule.label else {}
    if rule.end is not None:
        draw, ends = (found.vstrip, ("x0", "x1")) if rule.across == "x" else (found.hstrip, ("y0", "y1"))
        draw(**dict(zip(ends, ([rule.at], [rule.end]), strict=True)), color=rule.colour, alpha=0.15, **legend)
        return
    draw = found.vspan if rule.across == "x" else found.hspan
    shown = draw([rule.at], color=rule.colour, line_dash=_DASHES[rule.dash], line_width=rule.thick, **legend)
    _add_hover(found, [shown], [(rule.label or "at", f"@{rule.across}")])


def _add_hover(found: Any, renderers: list[Any], tooltips: list[tuple[str, str]]) -> None:
    from bokeh.models import HoverTool

    found.add_tools(HoverTool(renderers=renderers, tooltips=tooltips, visible=False))


def _percent() -> Any:
    from bokeh.models import NumeralTickFormatter

    return NumeralTickFormatter(format="0%")


def limit_shares(axis: Axis, marks: Sequence[Mark | Rule]) -> Axis:
    """Limit an axis of shares to the range from slightly below the smallest share to slightly above 1."""
    values = np.concatenate(
        [np.asarray(mark.y, dtype=float) for mark in marks if isinstance(mark, Mark)] or [np.ones(1)]
    )
    floor = max(0.0, np.floor((float(np.nanmin(values, initial=1.0)) - 0.02) * 20) / 20)
    return replace(axis, limits=(floor, 1 + 0.04 * (1 - floor)))
