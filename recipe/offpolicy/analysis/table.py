"""A table as a value that can be shown on a terminal or converted to HTML.

Rich is imported where it is used.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Align = Literal["left", "right"]

MISSING = "-"
"""Shown for None and NaN, which represent a missing value."""
_LARGE = 1e6
_READABLE = 24
"""Smallest column width, in characters, at which text that is broken between words is easy to read."""
_BORDER = 3
"""Number of characters that a terminal table adds per column; the table adds one more in total."""


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
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def get_alignment(self, column: int) -> Align:
        """Return the alignment of a column."""
        numeric = all(_is_number(row[column]) or row[column] is None for row in self.rows)
        return self.columns[column].align or ("right" if numeric else "left")


def format_cell(value: Any, digits: int = 3) -> str:
    """Format a cell as text.

    Digits of integers are grouped. Floats have ``digits`` decimals, or are in scientific notation if they would
    otherwise appear as 0 or with more than six digits before the point. None and NaN become ``MISSING``.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (_is_number(value) and math.isnan(value)):
        return MISSING
    if not _is_number(value):
        return str(value)
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    number = float(value)
    # A small value would be rounded to 0.000, which looks like exactly 0.
    if math.isfinite(number) and number and not 0.5 * 10**-digits <= abs(number) < _LARGE:
        return f"{number:.{min(digits, 2)}e}"
    return f"{number:.{digits}f}"


def format_rows(table: Table) -> list[list[str]]:
    """Format all cells of a table."""
    return [[format_cell(value, c.digits) for value, c in zip(row, table.columns, strict=True)] for row in table.rows]


def to_plain(value: Any) -> Any:
    """Convert nested values to types that JSON supports; NaN and infinities become null, and keys become text."""
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
    for row in format_rows(table):
        rich.add_row(*map(Text, row))
    return rich


def fit_to_width(table: Table, width: int) -> list[RichTable]:
    """Split the table between columns to fit a terminal of ``width`` characters without breaking a number.

    Each part repeats the first column to identify the rows; a table that fits is not split.
    """
    cells = format_rows(table)
    longest = [max((len(row[at]) for row in cells), default=0) for at in range(len(table.columns))]
    headings = [column.heading for column in table.columns]
    # Below this width, a column would break a number, a word of its heading, or its text every few characters.
    least = [
        max(*map(len, heading.split()), 0, most if table.get_alignment(at) == "right" else min(most, _READABLE))
        for at, (heading, most) in enumerate(zip(headings, longest, strict=True))
    ]

    def spare(group: Sequence[int]) -> int:
        return width - 1 - sum(least[at] + _BORDER for at in group)

    groups: list[list[int]] = [[0]]
    for index in range(1, len(least)):
        if spare([*groups[-1], index]) < 0 and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(index)
    parts = []
    for place, group in enumerate(groups):
        title = f"{table.title}, continued" if table.title and place else table.title
        rich = to_rich(
            Table([table.columns[a] for a in group], [[r[a] for a in group] for r in table.rows], title), width
        )
        left = spare(group)
        for at, column in zip(group, rich.columns, strict=True):
            more = max(0, min(max(len(headings[at]), longest[at]) - least[at], left))
            left -= more
            column.width = least[at] + more
        parts.append(rich)
    return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
