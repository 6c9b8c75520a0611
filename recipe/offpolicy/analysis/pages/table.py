"""A table as a value that can be shown on a terminal or converted to HTML."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.console import Console
    from rich.table import Table as RichTable


Align = Literal["left", "right"]

MISSING = "-"
"""Shown for None and NaN, which represent a missing value."""
_LARGE = 1e6
_READABLE = 24
"""Smallest column width, in characters, at which text that is broken between words is easy to read."""
_BORDER = 3
"""Number of characters that a terminal table adds per column; the table as a whole adds one more."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its heading.
        unit: shown after the heading, in brackets.
        digits: decimals of a float.
        align: alignment; if None, the column is aligned right if all its values are numbers or missing, otherwise left.
    """

    name: str
    unit: str = ""
    digits: int = 3
    align: Align | None = None

    @property
    def heading(self) -> str:
        """The column's name and unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Rows of cells: str, numbers, bool, or None for a missing value.

    Attributes:
        rows: rows with one cell per column.
        title: title above the table; empty for none.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {index} has {len(row)} cells, but the table has {len(self.columns)} columns: {row}"
                )

    def get_alignment(self, column: int) -> Align:
        """Return the alignment of a column."""
        given = self.columns[column].align
        if given is not None:
            return given
        return "right" if all(_is_number(row[column]) or row[column] is None for row in self.rows) else "left"


def format_cell(value: Any, digits: int = 3) -> str:
    """Format a cell as text.

    Digits of integers are grouped. Floats have ``digits`` decimals, or are in scientific notation if they would
    otherwise appear as 0 or with more than six digits before the point. None and NaN become ``MISSING``.
    """
    if value is None:
        return MISSING
    if not _is_number(value):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    number = float(value)
    if math.isnan(number):
        return MISSING
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    # A small value would be rounded to 0.000, which looks like exactly 0.
    if number and not 0.5 * 10**-digits <= abs(number) < _LARGE:
        return f"{number:.{min(digits, 2)}e}"
    return f"{number:.{digits}f}"


def to_plain(value: Any) -> Any:
    """Convert values at any depth to what JSON supports; NaN and infinities become null, and keys become text."""
    if is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_rich(table: Table, width: int | None = None) -> RichTable:
    """Convert for a terminal; square brackets in cells are text, not markup.

    Args:
        width: width of the terminal; a longer title is broken there.
    """
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        min_width=min(len(table.title), width or len(table.title)) or None,
    )
    for index, column in enumerate(table.columns):
        rich.add_column(Text(column.heading), justify=table.get_alignment(index), overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(text) for text in _texts(table, row)))
    return rich


def fit_to_width(table: Table, width: int) -> list[RichTable]:
    """Split the table between columns to fit a terminal of ``width`` characters without breaking a number.

    Each part repeats the first column to identify the rows; a table that fits is not split.
    """
    least = [_least_width(table, index) for index in range(len(table.columns))]
    groups: list[list[int]] = [[0]]
    for index in range(1, len(least)):
        if _needed([least[at] for at in [*groups[-1], index]]) > width and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(index)
    parts = []
    for place, group in enumerate(groups):
        part = _part(table, group, first=place == 0)
        widths = [least[at] for at in group]
        spare = width - _needed(widths)
        rich = to_rich(part, width)
        for at, column in enumerate(rich.columns):
            more = max(0, min(_whole_width(part, at) - widths[at], spare))
            spare -= more
            column.width = widths[at] + more
        parts.append(rich)
    return parts


def to_html(table: Table) -> Markup:
    """Convert to HTML; every cell is escaped."""
    from .template import render_template

    return render_template(
        "table",
        title=table.title,
        headings=[column.heading for column in table.columns],
        aligned=[table.get_alignment(index) for index in range(len(table.columns))],
        rows=[_texts(table, row) for row in table.rows],
    )


def _part(table: Table, columns: Sequence[int], *, first: bool) -> Table:
    """Return a table with only these columns of this table."""
    title = f"{table.title}, continued" if table.title and not first else table.title
    return Table([table.columns[at] for at in columns], [[row[at] for at in columns] for row in table.rows], title)


def _needed(widths: Sequence[int]) -> int:
    """Compute the width, in characters, of a terminal table whose columns have these widths."""
    return 1 + sum(width + _BORDER for width in widths)


def _least_width(table: Table, index: int) -> int:
    """Compute the width below which a column would break a number, a heading's word, or text every few characters."""
    column = table.columns[index]
    heading = max(map(len, column.heading.split()), default=0)
    longest = max((len(format_cell(row[index], column.digits)) for row in table.rows), default=0)
    return max(heading, longest if table.get_alignment(index) == "right" else min(longest, _READABLE))


def _whole_width(table: Table, index: int) -> int:
    """Compute the width at which nothing in a column is broken."""
    column = table.columns[index]
    return max(len(column.heading), *(len(format_cell(row[index], column.digits)) for row in table.rows), 0)


def _texts(table: Table, row: Sequence[Any]) -> list[str]:
    return [format_cell(value, column.digits) for value, column in zip(row, table.columns, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


PIPE_WIDTH = 100
"""Width in characters of a table that is written to a file or a pipe."""


def open_console() -> Console:
    """Open a console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table, split between columns if it is wider than the console; no number is cut."""
    for part in fit_to_width(table, console.width):
        console.print(part)


def print_blocks(console: Console, *blocks: Table | str, wrap: bool = False) -> None:
    """Print tables and lines of text; empty tables and lines are left out.

    Args:
        wrap: whether to break lines between words on a terminal, for text that need not be pasted.
    """
    from rich.text import Text

    for block in filter(None, blocks):
        if isinstance(block, Table):
            print_table(console, block)
        else:
            console.print(Text(block), soft_wrap=not (wrap and console.is_terminal))
