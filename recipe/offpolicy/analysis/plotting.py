"""Panels as plain values: marks on one pair of axes, which matplotlib draws into a picture or Bokeh onto a page.

Pictures are drawn without pyplot's global state or open figures. Both libraries are imported where they are used.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from . import AnalysisError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")

Series = Sequence[float] | NDArray[np.float64]
"""Values along the horizontal axis."""

INK: Final = "#1f2933"
MUTED: Final = "#7b8794"
PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Colours that colour-blind readers can tell apart: Okabe and Ito 2008, Color Universal Design, without yellow and with
grey instead of black."""
MARKERS: Final = "osD^vPX"
PANEL_WIDTH: Final = 5.2
"""Width in inches; with this width, the font size of two panels side by side matches the surrounding text of a page."""
_PIXELS = 90
"""Pixels on a page per inch of a panel's height."""
_LEGEND = 60
"""Number of characters of legend text that fit into the width of a panel."""
_BOKEH_DASHES = {"-": "solid", "--": "dashed", "-.": "dotdash", ":": "dotted"}
_BOKEH_MARKERS = dict(
    zip(MARKERS, ("circle", "square", "diamond", "triangle", "inverted_triangle", "plus", "x"), strict=True)
)
_STYLE: Any = {
    "font.size": 10, "text.color": INK, "figure.facecolor": "white", "savefig.facecolor": "white",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.titleweight": "bold", "axes.titlecolor": INK, "axes.titlelocation": "left", "axes.titlesize": 11,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e7eb",
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.8,
    "lines.markersize": 5, "svg.hashsalt": "offpolicy",
}  # fmt: skip


def check_target(option: str, path: Path, example: str) -> None:
    """Raise AnalysisError if no file can be written at the path that an option names.

    Args:
        example: a possible file name; if it is the name of a picture, the path must also have a picture's suffix.
    """
    if path.is_dir():
        raise AnalysisError(f"{option} {path}: this is a directory. Name a file, such as {option} {path / example}.")
    if Path(example).suffix in PICTURES and path.suffix.lower() not in PICTURES:
        kinds = " or ".join(PICTURES)
        raise AnalysisError(f"{option} {path}: {path.suffix or 'no suffix'} is not a picture format. Name it {kinds}.")
    if path.exists() and not path.is_file():
        # Writing replaces whatever exists at the path, even a device.
        raise AnalysisError(f"{option} {path}: this is not a regular file. Name a file, such as {option} {example}.")
    # Missing folders are created when the file is written, so the nearest existing folder must be writable.
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise AnalysisError(f"{option} {path}: no file can be written under {above}. Name another path.")


def check_outputs(options: argparse.Namespace, stem: str) -> None:
    """Raise AnalysisError if no file can be written at the path given by ``--png`` or ``--html``."""
    for kind in ("png", "html"):
        if (path := getattr(options, kind, None)) is not None:
            check_target(f"--{kind}", path, f"{stem}.{kind}")


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

    def draw(self, axes: Axes) -> None:
        """Draw onto axes of matplotlib."""
        x: Any = self.x
        if self.bar:
            error = None if self.band is None else np.abs(np.asarray(self.band) - np.asarray(self.y)).tolist()
            look: Any = {"color": self.colour, "alpha": self.alpha, "ecolor": INK}
            axes.bar(x, self.y, self.bar, self.base, label=self.label, yerr=error, **look)
            return
        axes.plot(
            x, self.y, color=self.colour, linestyle=self.dash or "none", marker=self.marker, linewidth=self.thick,
            label=self.label, clip_on=self.band is not None or not self.marker,
        )  # fmt: skip
        if self.band is not None:
            axes.fill_between(x, *self.band, color=self.colour, alpha=0.18, linewidth=0)

    def build(self, found: Any) -> None:
        """Add to a Bokeh figure."""
        x, y = np.asarray(self.x), np.asarray(self.y, dtype=float)
        look: Any = {"color": self.colour} | ({"legend_label": self.label} if self.label else {})
        low, high = (None, None) if self.band is None else (np.asarray(end, dtype=float) for end in self.band)
        shown = []
        if self.bar:
            shown.append(found.vbar(x, self.bar, self.base + y, self.base, alpha=self.alpha, **look))
            if low is not None:
                found.segment(x, low, x, high, color=INK)
        else:
            if low is not None:
                found.varea(x, low, high, alpha=0.18, **look)
            if self.dash:
                shown.append(found.line(x, y, line_dash=_BOKEH_DASHES[self.dash], line_width=self.thick, **look))
            if self.marker:
                shown.append(found.scatter(x, y, marker=_BOKEH_MARKERS[self.marker], size=7, **look))
        _add_hover(found, shown[-1:], [(self.label or "value", f"@{'top' if self.bar else 'y'}"), ("at", "@x")])


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

    def draw(self, axes: Axes) -> None:
        """Draw onto axes of matplotlib."""
        look: Any = {"color": self.colour, "label": self.label or None}
        if self.end is not None:
            span = axes.axvspan if self.across == "x" else axes.axhspan
            span(self.at, self.end, alpha=0.15, linewidth=0, **look)
        else:
            line = axes.axvline if self.across == "x" else axes.axhline
            line(self.at, linewidth=self.thick, linestyle=self.dash, **look)

    def build(self, found: Any) -> None:
        """Add to a Bokeh figure."""
        look: Any = {"color": self.colour} | ({"legend_label": self.label} if self.label else {})
        if self.end is not None:
            strip = found.vstrip if self.across == "x" else found.hstrip
            strip(**{f"{self.across}0": [self.at], f"{self.across}1": [self.end]}, alpha=0.15, **look)
            return
        span = found.vspan if self.across == "x" else found.hspan
        shown = span([self.at], line_dash=_BOKEH_DASHES[self.dash], line_width=self.thick, **look)
        _add_hover(found, [shown], [(self.label or "at", f"@{self.across}")])


def _add_hover(found: Any, renderers: list[Any], tooltips: list[tuple[str, str]]) -> None:
    from bokeh.models import HoverTool

    found.add_tools(HoverTool(renderers=renderers, tooltips=tooltips, visible=False))


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        alt: what the panel shows, for readers who cannot see it.
        note: text that is shown instead of marks.
        height: height in a picture, in inches; the width is ``PANEL_WIDTH``.
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
            mark.draw(axes)
        _set_axis(axes, "x", self.x)
        _set_axis(axes, "y", self.y)
        add_legend(axes, columns=self.columns)

    def build(self) -> Any:
        """Build the Bokeh figure, which supports zooming, hiding lines and reading off values."""
        from bokeh.models import NumeralTickFormatter
        from bokeh.models.annotations import Label
        from bokeh.plotting import figure

        options: Any = {}
        for name, axis in (("x", self.x), ("y", self.y)):
            options[f"{name}_axis_type"] = "log" if axis.log else "linear"
            options |= {f"{name}_range": axis.limits} if axis.limits else {}
        found: Any = figure(
            title=self.title, height=int(_PIXELS * self.height), sizing_mode="stretch_width",
            tools="pan,box_zoom,wheel_zoom,reset,save", active_scroll=None, toolbar_location="above", **options,
        )  # fmt: skip
        found.toolbar.logo = None
        for mark in self.marks:
            mark.build(found)
        if self.note:
            found.add_layout(Label(x=40, y=40, x_units="screen", y_units="screen", text=self.note, text_color=MUTED))
        for shown, of in ((found.xaxis, self.x), (found.yaxis, self.y)):
            shown.axis_label = of.label
            if of.ticks:
                shown.ticker, shown.major_label_overrides = list(of.ticks), dict(of.ticks)
            elif of.form == "percent":
                shown.formatter = NumeralTickFormatter(format="0%")
        if found.legend:
            found.add_layout(found.legend[0], "below")
            found.legend.click_policy, found.legend.label_text_font_size = "hide", "9pt"
            found.legend.ncols = self.columns
        return found


@dataclass(frozen=True)
class FigurePanel:
    """One panel of a picture, drawn onto empty axes by ``draw``; see ``Panel`` for the other attributes."""

    draw: Callable[[Axes], None]
    height: float = 3.8


def serialize(panel: Panel) -> str:
    """Serialize Bokeh's figure of a panel as JSON, the same for equal panels."""
    from bokeh.embed import json_item

    content = json.dumps(json_item(panel.build()))
    # Bokeh numbers its models consecutively across figures.
    ids = dict.fromkeys(re.findall(r'"id": "(p\d+)"', content))
    numbers = {name: f"p{place}" for place, name in enumerate(ids)}
    return re.sub(r'(?<=")p\d+(?=")', lambda found: numbers.get(found[0], found[0]), content)


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


def style_line(index: int, *, marker: bool = True) -> dict[str, Any]:
    """Return colour, dashes and marker of the index-th line of a panel, distinct among the first 28, for ``Mark``."""
    colour, dash = index % len(PALETTE), index // len(PALETTE) % 4
    return {
        "colour": PALETTE[colour],
        "dash": list(_BOKEH_DASHES)[dash],
        "marker": MARKERS[colour] if marker else "",
    }


def limit_shares(axis: Axis, marks: Sequence[Mark | Rule]) -> Axis:
    """Limit an axis of shares to a range from slightly below the smallest share to slightly above 1."""
    shares = [np.asarray(mark.y, dtype=float) for mark in marks if isinstance(mark, Mark)]
    floor = max(0.0, np.floor((float(np.nanmin(np.concatenate([np.ones(1), *shares]))) - 0.02) * 20) / 20)
    return replace(axis, limits=(floor, 1 + 0.04 * (1 - floor)))


def merge_equal_series(series: Mapping[str, Series]) -> dict[str, Series]:
    """Merge series that are equal at every point into one with a joined label, such as "rows kept, ESS"."""
    found: list[tuple[list[str], Series]] = []
    for label, values in series.items():
        same = (names for names, other in found if np.allclose(other, values, rtol=1e-3, atol=0, equal_nan=True))
        if (names := next(same, None)) is None:
            found.append(([label], values))
        else:
            names.append(label)
    return {", ".join(names): values for names, values in found}


@contextmanager
def apply_style() -> Iterator[None]:
    """Apply the style of this package to what is drawn and saved within the context."""
    from cycler import cycler
    from matplotlib import rc_context

    with rc_context(_STYLE | {"axes.prop_cycle": cycler(color=PALETTE)}):
        yield


def create_axes(
    rows: int = 1, columns: int = 1, *, width: float | None = None, height: float | None = None, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create an empty figure and its axes, in row order; call this within ``apply_style``.

    Args:
        width, height: in inches; None for 4.4 per column and 3.8 per row.
        options: options of ``Figure.subplots``, such as ``sharex``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width or 4.4 * columns, height or 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # the canvas that pyplot would attach; without it, nothing can be saved
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def draw_panels(drawn: Sequence[Panel | FigurePanel], columns: int = 1, title: str = "") -> Figure:
    """Draw panels into one figure, row by row; each row is as high as its tallest panel."""
    rows = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    with apply_style():
        figure, axes = create_axes(
            len(rows), columns, width=PANEL_WIDTH * columns, height=sum(heights),
            gridspec_kw={"height_ratios": heights},
        )  # fmt: skip
        for axis, panel in zip(axes, drawn, strict=False):
            panel.draw(axis)
        for axis in axes[len(drawn) :]:
            axis.remove()
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=MUTED)
    return figure


def add_legend(axes: Axes, columns: int = 2) -> None:
    """Add a legend below the axes, where it does not hide any line; add none if no line is labelled."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # A legend wider than its panel would leave no room for the curves.
        names = [textwrap.fill(label, _LEGEND // columns) for label in labels]
        below = 4.0 if axes.get_xlabel() else 2.4  # in font sizes: space for the numbers and the axis's name
        axes.legend(
            handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=below, ncols=columns
        )  # fmt: skip


def save(figure: Figure, path: Path, *, dpi: int = 130) -> None:
    """Write the figure in the format that the suffix of ``path`` names; equal figures produce equal files.

    Raises:
        OSError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".").lower()
    # Without date and version, output is reproducible.
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}.get(kind)
    buffer = io.BytesIO()
    with apply_style():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
