"""Import verl, and show the state of every contract in a process of this environment.

Prints one line per contract: patch, target, releases, state in this process, and whether the contract holds here. Exits
with 1 if a contract that matters here is broken, or if a requested patch is not in force.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable, Sequence

from . import PatchError, status
from .contract import installed_release
from .contract_table import Row, rows

COLUMNS = ("patch", "target", "releases", "state", "contract")
_WIDTH_OF_LOGS = 240


def show(table: list[Row]) -> None:
    """Print the table, with rich if it is installed."""
    cells = [(row.patch, row.target, row.releases, row.state, row.verdict) for row in table]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for line in (COLUMNS, *cells):
            sys.stdout.write(" | ".join(line) + "\n")
        return
    drawn = Table(*COLUMNS, title=f"verl {installed_release('verl') or 'is not installed'}", show_lines=False)
    for row, line in zip(table, cells, strict=True):
        drawn.add_row(*line, style="red" if row.broken else "")
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH_OF_LOGS)).print(drawn)


def main(arguments: Sequence[str] = ()) -> int:
    """Show the table and return the exit status."""
    argparse.ArgumentParser(prog="python -m verl_patches", description=__doc__).parse_args(arguments)
    try:
        importlib.import_module("verl")  # as in every process of a run; this loads the requested groups
        status()
        failed = ""
    except (PatchError, ImportError) as error:
        failed = str(error)
    table = rows()
    show(table)
    broken = [row for row in table if row.broken]
    _complain(f"{row.patch}: {row.verdict}" for row in broken)
    _complain([failed] if failed else [])
    return 1 if broken or failed else 0


def _complain(lines: Iterable[str]) -> None:
    sys.stderr.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
