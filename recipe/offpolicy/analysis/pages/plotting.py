"""Shared matplotlib style and helpers, without pyplot's global state or open figures; checks of output paths."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PICTURES = (".png", ".svg", ".pdf")
_KINDS = " or ".join(PICTURES)


class PageError(ValueError):
    """A page or figure cannot be written; the message says why and how to fix it."""


def check_target(option: str, path: Path, example: str) -> None:
    """Raise PageError if no file can be written at the path that an option names.

    Args:
        example: a possible file name; if it is the name of a picture, the path must also have a picture's suffix.
    """
    if Path(example).suffix in PICTURES and path.suffix.lower() not in PICTURES and not path.is_dir():
        raise PageError(f"{option} {path}: {path.suffix or 'no suffix'} is not a picture format. Name it {_KINDS}.")
    if path.is_dir():
        raise PageError(f"{option} {path}: it is a directory. Name a file, such as {option} {path / example}.")
    if path.exists() and not path.is_file():
        # Writing replaces whatever exists at the path, even a device.
        raise PageError(f"{option} {path}: it is not a regular file. Name a file, such as {option} {example}.")
    # Missing folders are created when the file is written, so the nearest existing folder must be writable.
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise PageError(f"{option} {path}: no file can be written under {above}. Name another place.")


Series = Sequence[float] | NDArray[np.float64]
"""Values along the horizontal axis."""

INK: Final = "#1f2933"
MUTED: Final = "#7b8794"
GRID: Final = "#e4e7eb"
PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Safe for the colour-blind: Okabe and Ito 2008, Color Universal Design, without yellow and with grey instead of
black."""
MARKERS: Final = "osD^vPX"
DASHES: Final = ("-", "--", "-.", ":")
PANEL_WIDTH: Final = 5.2
"""Width in inches; if a page shows two panels side by side, the font size then matches the surrounding text."""

_LEGEND = 60
"""Number of characters of legend text that fit into the width of a panel."""

_STYLE: Any = {
    "font.size": 10, "text.color": INK, "figure.facecolor": "white", "savefig.facecolor": "white",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.titleweight": "bold", "axes.titlecolor": INK, "axes.titlelocation": "left", "axes.titlesize": 11,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.8,
    "lines.markersize": 5, "svg.hashsalt": "offpolicy",
}  # fmt: skip


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


class Drawable(Protocol):
    """A panel that draws itself onto empty axes, ``height`` inches high."""

    @property
    def height(self) -> float: ...

    def draw(self, axes: Axes, /) -> None: ...


@dataclass(frozen=True)
class FigurePanel:
    """One panel of a figure.

    Attributes:
        draw: function that draws the panel onto empty axes.
        alt: what the panel shows, for readers who cannot see it.
        height: height in inches; the width is ``PANEL_WIDTH``.
    """

    draw: Callable[[Axes], None]
    alt: str
    height: float = 3.8


def draw_panels(drawn: Sequence[Drawable], columns: int = 1, title: str = "") -> Figure:
    """Draw panels into one figure, row by row; each row is as high as its tallest panel, and no cell is empty."""
    rows = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    with apply_style():
        figure, axes = create_axes(
            len(rows), columns, width=PANEL_WIDTH * columns, height=sum(heights),
            gridspec_kw={"height_ratios": heights},
        )  # fmt: skip
        for axis, panel in zip(axes, drawn, strict=False):
            panel.draw(axis)
        if left := axes[len(drawn) :]:
            # The last panel fills the cells that would otherwise be empty.
            last = axes[len(drawn) - 1]
            grid = last.get_gridspec()
            assert grid is not None  # subplots have one
            last.set_subplotspec(grid[-1, (len(drawn) - 1) % columns :])
            for axis in left:
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
        below = 4.0 if axes.get_xlabel() else 2.4  # font sizes: room for the numbers and the axis's name
        axes.legend(
            handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=below, ncols=columns
        )  # fmt: skip


def merge_equal_series(series: Mapping[str, Series]) -> dict[str, Series]:
    """Merge series that are equal at every point into one with a joined label, such as "rows kept, ESS"."""
    found: dict[str, Series] = {}
    for label, values in series.items():
        same = (name for name, other in found.items() if np.allclose(other, values, rtol=1e-3, atol=0, equal_nan=True))
        first = next(same, None)
        if first is None:
            found[label] = values
        else:
            found = {f"{name}, {label}" if name == first else name: other for name, other in found.items()}
    return found


def get_line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of the index-th line of a panel, distinct among the first 28."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def save(figure: Figure, path: Path, *, dpi: int = 130) -> None:
    """Write the figure in the format that the suffix of ``path`` names; equal figures produce equal files.

    Raises:
        PageError: matplotlib does not support the suffix.
        OSError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".").lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise PageError(f"{path}: .{kind} is not a picture format. Name it .png, or one of {', '.join(sorted(known))}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_bytes(figure, kind, dpi))


def _bytes(figure: Figure, kind: str, dpi: int) -> bytes:
    """Render the figure in one format, without date or version, so that output is reproducible."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}.get(kind)
    buffer = io.BytesIO()
    with apply_style():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
    return buffer.getvalue()
