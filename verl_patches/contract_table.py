"""The table that `python -m verl_patches` prints: every contract, the state of its patch, and whether it holds."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

from .contract import Contract, NotInstalledError, PatchError, installed_release, is_needed, of_installed
from .groups import GROUPS, Group

OK, NOT_HERE, MISSING = "ok", "not for this release", "not installed"
CALLS, OFF, NOT_NEEDED = "calls", "off", "not needed"
_HERE = __name__.rpartition(".")[0]
_INFRASTRUCTURE = {
    "__main__",
    "contract",
    "deferred",
    "failures",
    "groups",
    "plugin",
    "releases",
    "runtime_env",
    "contract_table",
}


@dataclass(frozen=True)
class Row:
    """One contract.

    Attributes:
        patch, target, releases: as in the contract.
        state: state of the patch in this process; "calls" for functions that are called and not patched; the missing
            module if the patch cannot be imported without it.
        verdict: "ok", why the contract does not matter here, or why it is broken.
        broken: whether the contract matters here and does not hold. A contract that belongs to an option does not
            matter in an untested release, because the option is rejected there.
    """

    patch: str
    target: str
    releases: str
    state: str
    verdict: str
    broken: bool


def rows() -> list[Row]:
    """Build a row for every contract of this package, group by group; ungrouped contracts come first."""
    names = sorted(_modules(_HERE) - set(GROUPS) - _INFRASTRUCTURE)
    seams = {name: importlib.import_module(f"{_HERE}.{name}") for name in names}
    contracts = {name: _contracts_of(module) for name, module in seams.items()}
    # Some contracts apply only to certain releases; a release that no contract covers was not tested.
    release = installed_release("verl")
    tested = release is not None and any(each.covers(release) for found in contracts.values() for each in found)
    rows = [
        _row(name, each, _state_alone(seams[name], each), tested)
        for name, found in contracts.items()
        for each in _per_target(found)
    ]
    for group in GROUPS.values():
        rows += _rows_of_group(group)
    return rows


def _state_alone(module: ModuleType, contracts: list[Contract]) -> str:
    """Return the state of a module without a group: of the patch that the trainer installs, or of called functions.

    If the trainer wraps a function, the contract is in force in the trainer's process.
    """
    if hasattr(module, "in_force"):
        return "in force" if module.in_force() else OFF
    return "in force" if any(each.in_force() for each in contracts) else CALLS


def _rows_of_group(group: Group) -> Iterator[Row]:
    loaded = group.module in sys.modules
    package = importlib.import_module(group.module)
    states = package.status()
    if not loaded:  # a group that installed itself just now is in force in no other process of this environment
        states = {name: state if state == NOT_NEEDED else OFF for name, state in states.items()}
    for name in states:
        if not group.needed():
            yield Row(f"{group.name}.{name}", "", "", states[name], f"not needed: {group.when}", broken=False)
            continue
        try:
            patch = package.find_patch(name)
        except ModuleNotFoundError as error:
            yield _without(f"{group.name}.{name}", error)
            continue
        for each in _per_target(_contracts_of(patch)):
            yield _row(f"{group.name}.{name}", each, states[name], may_be_of_others=states[name] == NOT_NEEDED)


def _without(patch: str, error: ModuleNotFoundError) -> Row:
    """Build the row of a patch whose distribution is missing; it is broken if verl or this package is missing."""
    broken = is_needed(error)
    return Row(patch, "", "", f"{error.name} is missing", str(error) if broken else MISSING, broken)


def _row(patch: str, contracts: list[Contract], state: str, may_be_of_others: bool) -> Row:
    contract = of_installed(*contracts)
    release = installed_release(contract.distribution)
    tested = " or ".join(dict.fromkeys(each.tested for each in contracts))
    if may_be_of_others and release is not None and not contract.covers(release):
        verdict, broken = NOT_HERE, False
    else:
        verdict, broken = _verdict(contract)
        if broken and contract.option and release is not None and not contract.covers(release):
            verdict, broken = f"{contract.option} is refused here: {verdict}", False
    return Row(patch, contract.target, tested, state, verdict, broken)


def _verdict(contract: Contract) -> tuple[str, bool]:
    try:
        contract.check()
    except NotInstalledError:
        return MISSING, False
    except PatchError as error:
        return str(error), True
    return OK, False


def _contracts_of(patch: object) -> list[Contract]:
    """Collect the contracts that a module or a patch object declares, as attributes or in tuples."""
    found: list[Contract] = []
    # The limit on the depth ensures that cycles end.
    _collect(vars(patch).values(), found, depth=5)
    return list(dict.fromkeys(found))


def _collect(values: Iterable[object], found: list[Contract], depth: int) -> None:
    for value in values:
        if isinstance(value, Contract):
            found.append(value)
        elif depth and isinstance(value, tuple | list):
            _collect(value, found, depth - 1)
        elif depth and type(value).__module__.startswith(f"{_HERE}."):
            _collect(vars(value).values() if hasattr(value, "__dict__") else (), found, depth - 1)


def _per_target(contracts: list[Contract]) -> list[list[Contract]]:
    """Group contracts that differ by release: they have the same target, or the same name if a target has moved.

    A contract is left out if another contract of the same name applies to the installed release.
    """
    named: dict[tuple[str, str], list[Contract]] = {}
    for contract in contracts:
        named.setdefault((contract.name, contract.distribution), []).append(contract)
    rows: list[list[Contract]] = []
    for (_, distribution), turns in named.items():
        release = installed_release(distribution)
        here = {each.target for each in turns if release and each.covers(release)}
        rows += [[each for each in turns if each.target == target] for target in sorted(here)] or [turns]
    return rows


def _modules(package: str) -> set[str]:
    return {found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)}
