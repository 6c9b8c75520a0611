"""A table as a value, and the three forms that it is shown in."""

from __future__ import annotations

import csv
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.table import Table as RichTable

Align = Literal["left", "right"]

MISSING = "-"
"""Shown for None and NaN: there is no value."""
_LARGE = 1e6


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its heading.
        unit: shown after the heading, in brackets.
        digits: decimals of a float.
        align: None: right, if every value in it is a number or missing; left otherwise.
    """

    name: str
    unit: str = ""
    digits: int = 3
    align: Align | None = None

    @property
    def heading(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """Rows of cells: str, numbers, bool, or None for what has no value.

    Attributes:
        rows: one cell a column each.
        title: above it; empty for none.

    Raises:
        ValueError: a row with more or fewer cells than columns.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {index} has {len(row)} cells, and the table {len(self.columns)} columns: {row}")

    def aligned(self, column: int) -> Align:
        """Where the values of a column stand."""
        given = self.columns[column].align
        if given is not None:
            return given
        return "right" if all(_is_number(row[column]) or row[column] is None for row in self.rows) else "left"


def shown(value: Any, digits: int = 3) -> str:
    """A cell as text.

    Integers have their digits in groups; floats have ``digits`` decimals, or powers of ten where that would show 0 or
    more than six digits before the point; None and NaN are ``MISSING``.
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
    if number and not 0.5 * 10**-digits <= abs(number) < _LARGE:
        return f"{number:.{min(digits, 2)}e}"
    return f"{number:.{digits}f}"


def to_rich(table: Table) -> RichTable:
    """For a terminal; square brackets in cells are text, not markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    rich = RichTable(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        min_width=len(table.title) or None,
    )
    for index, column in enumerate(table.columns):
        rich.add_column(Text(column.heading), justify=table.aligned(index), overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(text) for text in _texts(table, row)))
    return rich


def to_html(table: Table) -> Markup:
    """For a page; every cell is escaped."""
    from .template import rendered

    return rendered(
        "table",
        title=table.title,
        headings=[column.heading for column in table.columns],
        aligned=[table.aligned(index) for index in range(len(table.columns))],
        rows=[_texts(table, row) for row in table.rows],
    )


def to_csv(table: Table, path: Path) -> None:
    """With a line of headings; floats with all of their digits, None as nothing."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([column.heading for column in table.columns])
        writer.writerows(table.rows)


def _texts(table: Table, row: Sequence[Any]) -> list[str]:
    return [shown(value, column.digits) for value, column in zip(row, table.columns, strict=True)]


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
