"""Let VERL_ENGINE_DEVICE choose the training engine in releases of verl that do not read it.

An engine is registered for devices by name, none of them `cpu`; those for `cuda` run there. From 0.9 verl reads the
variable itself. For earlier releases, this patch also registers every engine of the named device for `cpu`, through
verl's own registry.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ..contract import Contract, PatchError, logger
from ..deferred import after_import
from ..releases import specifiers
from .release_patch import installed_has

MODULE = "verl.workers.engine"
VARIABLE = "VERL_ENGINE_DEVICE"
REGISTER = Contract(
    name="engine_device",
    target=f"{MODULE}.base:EngineRegistry.register",
    signature="(model_type, backend, device='cuda')",
    distribution="verl",
    releases=specifiers(lambda release: not release.platforms),
)


def _registered() -> dict[str, dict[str, dict[str, Any]]]:
    """Return verl's registry: model type -> backend -> device -> engine class."""
    registry = importlib.import_module(f"{MODULE}.base").EngineRegistry
    # Without the attribute no engine is found, which ``_register_for_cpu`` reports.
    engines: dict[str, dict[str, dict[str, Any]]] = getattr(registry, "_engines", {})
    return engines


def _register_for_cpu() -> None:
    register, device, count = REGISTER.check(), os.environ.get(VARIABLE), 0
    for model_type, backends in _registered().items():
        for backend, engines in backends.items():
            if engine := engines.get(device or ""):
                register(model_type, backend, device="cpu")(engine)
                count += 1
    if not count:
        raise PatchError(REGISTER.moved(f"no engine for {VARIABLE}={device!r}", "engines to be registered by device"))
    logger.info("patch %s in force: %d engines of %s serve cpu", REGISTER.name, count, device)


def needed() -> bool:
    """Return True if the installed verl does not read the variable."""
    return installed_has(lambda release: not release.platforms)


def install() -> None:
    """Register the engines now or when verl's engines are imported."""
    if needed() and not in_force() and not waiting():
        after_import(MODULE, _register_for_cpu)


def waiting() -> bool:
    return any(getattr(finder, "action", None) is _register_for_cpu for finder in sys.meta_path)


def in_force() -> bool:
    if MODULE not in sys.modules:
        return False
    return any("cpu" in engines for backends in _registered().values() for engines in backends.values())
