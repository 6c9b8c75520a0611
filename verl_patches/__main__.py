"""Import verl and show the state of every contract in a process of this environment.

Prints one line per contract: patch, target, releases, state in this process, and whether the installed release meets
the contract. Exits with 1 if a relevant contract is broken, or if a requested patch is not in force.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from . import GROUPS, OFF, Group, PatchError, hydra_sections, rollout_seams, status, trainer_seams, worker_seams
from .contract import Contract, NotInstalledError, installed_release, is_needed

COLUMNS = ("patch", "target", "releases", "state", "contract")
_WIDTH_OF_LOGS = 240
_UNGROUPED = (hydra_sections, rollout_seams, trainer_seams, worker_seams)
OK, NOT_HERE, MISSING = "ok", "not for this release", "not installed"
CALLS, NOT_NEEDED = "calls", "not needed"


@dataclass(frozen=True)
class Row:
    """One contract.

    Attributes:
        patch, target, releases: as in the contract.
        state: state of the patch in this process; "calls" for functions that are called but not patched; the name of a
            missing module if the patch cannot be imported without it.
        verdict: "ok", or the reason why the contract is broken or irrelevant here.
        broken: whether the contract is relevant here but not met. A contract that belongs to an option is irrelevant in
            an untested release, because the option is rejected there.
    """

    patch: str
    target: str
    releases: str
    state: str
    verdict: str
    broken: bool


def rows() -> list[Row]:
    """Build a row for every contract of this package, group by group; contracts without a group come first."""
    contracts = {module: _contracts_of(module) for module in _UNGROUPED}
    # Some contracts apply only to certain releases. A release that no contract covers was not tested.
    release = installed_release("verl")
    tested = release is not None and any(each.covers(release) for found in contracts.values() for each in found)
    rows = [
        _row(module.__name__.rpartition(".")[2], each, _state_alone(module, each), tested)
        for module, found in contracts.items()
        for each in found
    ]
    for group in GROUPS.values():
        rows += _rows_of_group(group)
    return rows


def _contracts_of(module: ModuleType) -> list[Contract]:
    """Collect the contracts that a module defines as attributes or in tuples."""
    values = vars(module).values()
    found = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    return list(dict.fromkeys(each for each in found if isinstance(each, Contract)))


def _state_alone(module: ModuleType, contract: Contract) -> str:
    """Return the state of a contract that belongs to no group: a patch that the run installs, or a called function.

    If the trainer wraps a function, the contract is in force in the trainer's process.
    """
    if contract.in_force():
        return "in force"
    return OFF if contract in getattr(module, "PATCHES", ()) else CALLS


def _rows_of_group(group: Group) -> Iterator[Row]:
    loaded = group.module in sys.modules
    package = group.load()
    states = package.status()
    if not loaded:  # a group that installed itself only now is not in force in other processes of this environment
        states = {name: state if state == NOT_NEEDED else OFF for name, state in states.items()}
    for name in states:
        if not group.needed():
            yield Row(f"{group.name}.{name}", "", "", states[name], f"not needed: {group.when}", broken=False)
            continue
        try:
            patch = package.find_patch(name)
        except ModuleNotFoundError as error:  # broken if verl or this package is missing
            broken = is_needed(error)
            missing = f"{error.name} is missing"
            yield Row(f"{group.name}.{name}", "", "", missing, str(error) if broken else MISSING, broken)
            continue
        for contract, _ in patch.wrappers:
            yield _row(f"{group.name}.{name}", contract, states[name], may_be_of_others=states[name] == NOT_NEEDED)


def _row(patch: str, contract: Contract, state: str, may_be_of_others: bool) -> Row:
    release = installed_release(contract.distribution)
    elsewhere = release is not None and not contract.covers(release)
    verdict, broken = (NOT_HERE, False) if may_be_of_others and elsewhere else _verdict(contract)
    if broken and contract.option and elsewhere:
        verdict, broken = f"{contract.option} is rejected here: {verdict}", False
    return Row(patch, contract.target, contract.tested, state, verdict, broken)


def _verdict(contract: Contract) -> tuple[str, bool]:
    try:
        contract.check()
    except NotInstalledError:
        return MISSING, False
    except PatchError as error:
        return str(error), True
    return OK, False


def show(table: list[Row]) -> None:
    """Print the table, with rich if it is installed."""
    cells = [(row.patch, row.target, row.releases, row.state, row.verdict) for row in table]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        sys.stdout.writelines(" | ".join(line) + "\n" for line in (COLUMNS, *cells))
        return
    drawn = Table(*COLUMNS, title=f"verl {installed_release('verl') or 'is not installed'}", show_lines=False)
    for row, line in zip(table, cells, strict=True):
        drawn.add_row(*line, style="red" if row.broken else "")
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH_OF_LOGS)).print(drawn)


def main(arguments: Sequence[str] = ()) -> int:
    """Show the table and return the exit status."""
    argparse.ArgumentParser(prog="python -m verl_patches", description=__doc__).parse_args(arguments)
    failed = []
    try:
        importlib.import_module("verl")  # as in every process of a run; this loads the requested groups
        status()
    except (PatchError, ImportError) as error:
        failed = [str(error)]
    table = rows()
    show(table)
    failed = [*(f"{row.patch}: {row.verdict}" for row in table if row.broken), *failed]
    sys.stderr.writelines(f"{line}\n" for line in failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
