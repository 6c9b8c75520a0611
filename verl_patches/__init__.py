"""Adapters for versions and platforms. Only this package changes the internals of verl and its engines.

Importing this package changes nothing. `install()` installs the groups of patches that this process can need, given the
installed verl and the platform; `install(group)` installs a single group; `status()` reports which patches are in
force. verl itself loads a group into every process of a run, through VERL_USE_EXTERNAL_MODULES=verl_patches.<group> or,
from 0.9, through its entry points (plugin.py). `python -m verl_patches` prints the state of this environment.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .contract import Contract, PatchError, location

__all__ = ["GROUPS", "Contract", "PatchError", "install", "needed", "status"]

EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
ASKED_BY_NAME = "OFFPOLICY_PATCHES"
AUTO = "auto"
OFF = "off"


@dataclass(frozen=True)
class Group:
    """A folder of patches that are installed together.

    Attributes:
        name: name of the sub-package, which has `install()`, `status()` and the names of its patches in `PATCHES`.
        when: description of the condition under which the group is needed.
        needed: whether this process can need the group; reads only the environment and the files of the installed
            verl, and imports nothing.
    """

    name: str
    when: str
    needed: Callable[[], bool]

    @property
    def module(self) -> str:
        """Dotted name of the group's package."""
        return f"{__name__}.{self.name}"

    def load(self) -> Any:
        """Import the group's package."""
        return importlib.import_module(self.module)


def has_legacy_actors() -> bool:
    """Return True if the installed verl has the legacy FSDP actor; read from its files, without importing it."""
    folder = location("verl")
    return folder is not None and (folder / "workers" / "actor" / "dp_actor.py").is_file()


GROUPS: Mapping[str, Group] = {
    group.name: group
    for group in (
        Group("cpu", "VERL_PLATFORM=cpu", lambda: os.environ.get("VERL_PLATFORM") == "cpu"),
        Group("legacy", "the installed verl has legacy actors (0.7)", has_legacy_actors),
    )
}


def needed() -> list[str]:
    """Return the names of the groups that this process can need, for the installed verl and the platform."""
    return [name for name, group in GROUPS.items() if group.needed()]


def named(environ: Mapping[str, str]) -> list[str]:
    """Return the value of `OFFPOLICY_PATCHES`: names of groups, or "auto"."""
    return [name.strip() for name in environ.get(ASKED_BY_NAME, "").split(",") if name.strip()]


def asked_for(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the groups that the environment requests, in either of the two variables."""
    modules = environ.get(EXTERNAL_MODULES, "").split(",")
    names = named(environ)
    automatic = needed() if AUTO in names else []
    return [name for name, group in GROUPS.items() if group.module in modules or name in [*names, *automatic]]


# Failures that an importer may swallow: verl logs a failing plugin at DEBUG and continues, and libraries catch errors
# of optional imports. Without this record, only the consequences of a missing patch would be noticed.
_failures: dict[str, None] = {}


def record_failure(where: str, error: BaseException) -> None:
    """Record a failure in this process, once, so that `status()` raises it."""
    _failures[f"{where}: {error}"] = None


def install(group: str | None = None) -> dict[str, Any]:
    """Install every patch of a group in this process. Idempotent.

    Args:
        group: one of `GROUPS`, or None for all groups that this process can need.

    Returns:
        The group's status; if ``group`` is None, the status of each installed group.

    Raises:
        PatchError: the group is unknown, or a target differs from the one for which the patch was written; the message
            names the fix.
    """
    if group is None:
        return {name: _install(GROUPS[name]) for name in needed()}
    if group not in GROUPS:
        raise PatchError(f"unknown group of patches {group!r}. Fix: use one of {', '.join(GROUPS)}.")
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
    if _failures:
        raise PatchError("\n".join(_failures))
    # A group may install itself when it is imported. Importing it here would be too late, but it would look as if the
    # group had been installed in time.
    states = {name: _states(group) if group.module in sys.modules else {} for name, group in GROUPS.items()}
    if "verl" in sys.modules:
        for name in asked_for(os.environ):
            if set(states[name].values()) <= {OFF}:
                raise PatchError(_not_loaded(GROUPS[name]))
    return states


def _install(group: Group) -> dict[str, str]:
    group.load().install()
    return _states(group)


def _states(group: Group) -> dict[str, str]:
    return dict(group.load().status())


def _not_loaded(group: Group) -> str:
    return (
        f"the environment requests the patches {group.name!r}, but none of them is installed in this process: verl "
        f"reads OFFPOLICY_PATCHES from 0.9 on, if this package is installed and VERL_USE_EXTERNAL_PLUGINS allows "
        f"it. Fix: export VERL_USE_EXTERNAL_MODULES={group.module} before verl is imported."
    )
