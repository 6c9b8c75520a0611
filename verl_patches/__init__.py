"""Adapters for versions and platforms: the only package that changes the internals of verl and its engines.

Importing this package changes nothing. `install()` installs the groups of patches that this process can need, given the
installed verl and the platform; `install(group)` installs a single group; `status()` reports which patches are in
force. verl itself loads a group into every process of a run, through VERL_USE_EXTERNAL_MODULES=verl_patches.<group> or,
from 0.9, through its entry points (plugin.py). `python -m verl_patches` prints the state of this environment.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, overload

from .contract import Contract, PatchError
from .failures import recorded
from .groups import GROUPS, Group, asked_for, needed

__all__ = ["GROUPS", "Contract", "PatchError", "install", "needed", "status"]

OFF = "off"


@overload
def install() -> dict[str, dict[str, str]]: ...
@overload
def install(group: str) -> dict[str, str]: ...
@overload
def install(group: None) -> dict[str, dict[str, str]]: ...
def install(group: str | None = None) -> dict[str, dict[str, str]] | dict[str, str]:
    """Install every patch of a group in this process. Idempotent.

    Args:
        group: one of `GROUPS`, or None for all groups that this process can need.

    Returns:
        The group's status; if ``group`` is None, the status of each installed group.

    Raises:
        PatchError: the group is unknown, or a target is not what the patch was written for; the message names the fix.
    """
    if group is None:
        return {name: _install(GROUPS[name]) for name in needed()}
    if group not in GROUPS:
        raise PatchError(f"unknown group of patches {group!r}. Fix: one of {', '.join(GROUPS)}.")
    return _install(GROUPS[group])


def status() -> dict[str, dict[str, str]]:
    """Return, for each group, each patch and its state in this process.

    The state is "in force", "waiting" for the import of its target, "not needed" by the installed releases, or "off".
    The function imports no group and no target, so any process can call it when it starts. A group that was not loaded
    has no patches in this process.

    Raises:
        PatchError: a patch failed in this process and its loader continued, or verl is imported and a group that the
            environment requests was not installed.
    """
    if failed := recorded():
        raise PatchError("\n".join(failed))
    # A group may install itself when it is imported. Importing it here would be too late, but it would look as if the
    # group had been installed in time.
    states = {name: _states(group) if group.module in sys.modules else {} for name, group in GROUPS.items()}
    if "verl" in sys.modules:
        for name in asked_for():
            if set(states[name].values()) <= {OFF}:
                raise PatchError(_not_loaded(GROUPS[name]))
    return states


def _install(group: Group) -> dict[str, str]:
    _module(group).install()
    return _states(group)


def _states(group: Group) -> dict[str, str]:
    return dict(_module(group).status())


def _module(group: Group) -> Any:
    return importlib.import_module(group.module)


def _not_loaded(group: Group) -> str:
    return (
        f"the environment requests the patches {group.name!r}, but none of them is installed in this process: verl "
        f"reads OFFPOLICY_PATCHES from 0.9 on, if this package is installed and VERL_USE_EXTERNAL_PLUGINS allows "
        f"it. Fix: export VERL_USE_EXTERNAL_MODULES={group.module} before verl is imported."
    )
