"""A `cpu` platform for verl's platform registry: it uses gloo, has no streams, and uses Ray's "GPU" as a slot.

verl 0.9 ships only cuda, rocm and npu, and lets external modules register more, so this is an extension and changes
nothing in verl. Ray's resource stays "GPU": verl's placement groups request it, and a run on the CPU advertises as many
of them as it has workers (`ray_kwargs.ray_init.num_gpus`). Earlier releases have no platforms; see of_verl.py.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..contract import Contract, PatchError, logger
from ..releases import specifiers
from .release_patch import installed_has

NAME = "cpu"
REGISTRY = Contract(
    name="platform",
    target="verl.plugin.platform.platform_manager:PlatformRegistry.register",
    signature="(platform)",
    distribution="verl",
    releases=specifiers(lambda release: release.platforms),
)


def needed() -> bool:
    """Return True if the installed verl has a platform registry."""
    return installed_has(lambda release: release.platforms)


def install() -> None:
    """Register the platform under "cpu", once."""
    if not needed():
        return
    register = REGISTRY.check()
    platform = _platform()
    if missing := sorted(getattr(platform, "__abstractmethods__", ())):
        raise PatchError(REGISTRY.moved(f"a PlatformBase that also requires {', '.join(missing)}"))
    if not in_force():
        register(platform=NAME)(platform)
        logger.info("patch %s in force: verl platform %r", REGISTRY.name, NAME)


def in_force() -> bool:
    """Return True if the platform is registered in this process."""
    manager = importlib.import_module("verl.plugin.platform.platform_manager")
    return bool(manager.PlatformRegistry.get(NAME) is _platform())


def _platform() -> Any:
    # This is imported late because its base class exists only in verl 0.9 and later.
    return importlib.import_module(f"{__package__}.platform_cpu").PlatformCPU
