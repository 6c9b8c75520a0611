"""Groups of patches: the purpose of each group, who requested it, and whether this process can need it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .contract import location

EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"
ASKED_BY_NAME = "OFFPOLICY_PATCHES"
AUTO = "auto"
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Group:
    """A folder of patches that are installed together.

    Attributes:
        name: name of the sub-package, which has `install()`, `status()` and the names of its modules in `PATCHES`.
        when: the capability, in words, that decides whether the group is needed.
        needed: whether this process can need the group; reads only the environment and the files of the installed
            verl, and imports nothing.
    """

    name: str
    when: str
    needed: Callable[[], bool]

    @property
    def module(self) -> str:
        """Dotted name of the group's package."""
        return f"{_PACKAGE}.{self.name}"


def _on_cpu() -> bool:
    return os.environ.get("VERL_PLATFORM") == "cpu"


def _has_legacy_actor() -> bool:
    folder = location("verl")
    return folder is not None and (folder / "workers" / "actor" / "dp_actor.py").is_file()


GROUPS: Mapping[str, Group] = {
    group.name: group
    for group in (
        Group("cpu", "VERL_PLATFORM=cpu", _on_cpu),
        Group("legacy", "the installed verl has legacy actors (0.7)", _has_legacy_actor),
    )
}


def needed() -> list[str]:
    """Return the names of the groups that this process can need, for the installed verl and the platform."""
    return [name for name, group in GROUPS.items() if group.needed()]


def named(environ: Mapping[str, str]) -> list[str]:
    """Return the value of `OFFPOLICY_PATCHES`: names of groups, or "auto"."""
    return [name.strip() for name in environ.get(ASKED_BY_NAME, "").split(",") if name.strip()]


def asked_for(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of the groups that the environment requests, in either of the two variables."""
    environ = os.environ if environ is None else environ
    modules = environ.get(EXTERNAL_MODULES, "").split(",")
    names = named(environ)
    automatic = needed() if AUTO in names else []
    return [name for name, group in GROUPS.items() if group.module in modules or name in [*names, *automatic]]
