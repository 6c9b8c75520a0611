"""Printing of tables: as wide as the terminal, or as a page of text where standard output is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .table import Table, fit_to_width

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100
"""Characters of a line of a table that goes to a file or a pipe."""


def open_console() -> Console:
    """Open a console on standard output."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table, split between columns where it is wider than the console; no number is cut."""
    for part in fit_to_width(table, console.width):
        console.print(part)


def print_blocks(console: Console, *blocks: Table | str) -> None:
    """Print tables and lines of text, which are whole however narrow the console is; empty ones are left out."""
    from rich.text import Text

    for block in filter(None, blocks):
        if isinstance(block, Table):
            print_table(console, block)
        else:
            console.print(Text(block), soft_wrap=True)
