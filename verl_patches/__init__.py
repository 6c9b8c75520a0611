"""Version and platform adapters: the only place that touches the internals of verl and its engines.

Importing this package changes nothing. `install(group)` puts the patches of a group in force in this
process, `status()` tells which are. The group "cpu" is loaded into every process of a run by verl itself,
through VERL_USE_EXTERNAL_MODULES=verl_patches.cpu.
"""

from __future__ import annotations

import importlib
from typing import Any

from .contract import Contract, PatchError

__all__ = ["GROUPS", "Contract", "PatchError", "install", "status"]

GROUPS = ("cpu",)


def install(group: str) -> dict[str, str]:
    """Installs every patch of a group in this process and returns the group's status. Idempotent.

    Raises:
        PatchError: a target is not what the patch was written for; the message names the mend.
    """
    module = _group(group)
    module.install()
    states: dict[str, str] = module.status()
    return states


def status() -> dict[str, dict[str, str]]:
    """For each group, each patch and its state in this process: "in force", "waiting" or "off"."""
    return {group: dict(_group(group).status()) for group in GROUPS}


def _group(group: str) -> Any:
    if group not in GROUPS:
        raise PatchError(f"unknown group of patches {group!r}. Fix: one of {', '.join(GROUPS)}.")
    return importlib.import_module(f"{__name__}.{group}")
