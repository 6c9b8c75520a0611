"""Patches for different releases and platforms. Only this package changes the internals of verl and its engines.

Importing this package patches nothing. `install()` installs the groups of patches that this process may need, given the
installed verl and the platform; `install(group)` installs a single group; `status()` reports which patches are in
force. verl itself loads a group in every process of a run if VERL_USE_EXTERNAL_MODULES=verl_patches.<group> is set or,
from 0.9 on, through an entry point (plugin.py). `python -m verl_patches` prints the state of all patches in this
environment.
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
        name: name of the subpackage, which defines `install()`, `status()` and `PATCHES`, the names of its patches.
        when: description of the condition under which the group is needed.
        needed: returns whether this process may need the group; reads only the environment and the files of the
            installed verl, and imports nothing.
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
    """Return True if the installed verl contains the legacy FSDP actor; only looks for the file and imports nothing."""
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
    """Return the names of the groups that this process may need, given the installed verl and the platform."""
    return [name for name, group in GROUPS.items() if group.needed()]


def named(environ: Mapping[str, str]) -> list[str]:
    """Return the value of `OFFPOLICY_PATCHES`: names of groups, or "auto"."""
    return [name.strip() for name in environ.get(ASKED_BY_NAME, "").split(",") if name.strip()]


def asked_for(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the groups that the environment requests through either of its two variables."""
    modules = environ.get(EXTERNAL_MODULES, "").split(",")
    names = named(environ)
    automatic = needed() if AUTO in names else []
    return [name for name, group in GROUPS.items() if group.module in modules or name in [*names, *automatic]]


# Failures that an importer may swallow: if a plugin fails, verl logs it at DEBUG and continues, and libraries catch
# errors of optional imports. Without this record, a missing patch would be noticed only by its consequences.
_failures: dict[str, None] = {}


def record_failure(where: str, error: BaseException) -> None:
    """Record a failure in this process, so that `status()` raises it; each failure is recorded only once."""
    _failures[f"{where}: {error}"] = None


def install(group: str | None = None) -> dict[str, Any]:
    """Install every patch of a group in this process. Idempotent.

    Args:
        group: one of `GROUPS`, or None for all groups that this process may need.

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
    """Return the state of each patch in this process, by group.

    The state is "in force", "waiting" for the import of its target, "not needed" by the installed releases, or "off".
    The function imports neither groups nor targets, so any process can call it at startup. For a group that was not
    loaded, it returns no patches.

    Raises:
        PatchError: a patch failed in this process but its loader continued, or verl has been imported but a group that
            the environment requests has not been installed.
    """
    if _failures:
        raise PatchError("\n".join(_failures))
    # A group may install itself when it is imported. Importing it here would be too late, but the group would then look
    # as if it had been installed in time.
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
