"""Corrections on verl's legacy actors, which lack ``set_loss_fn``. verl itself loads this package in every process:

    VERL_USE_EXTERNAL_MODULES=verl_patches.legacy

An update is changed only if its batch contains a ``LegacyHandover``. Each patch is the ``PATCH`` of a module that is
imported after the actor that it patches; most processes never import an actor.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

from .. import has_legacy_actors
from ..contract import NotInstalledError, PatchError, installed_release, is_needed
from ..deferred import ReleasePatch, after_import, is_awaited

PATCHES = {
    "fsdp_actor": "verl.workers.actor.dp_actor",
    "megatron_actor": "verl.workers.actor.megatron_actor",
}
"""Maps each patch's module to the module of verl after whose import the patch is installed."""


def install() -> None:
    """Install the group in this process: each patch at once, or when its actor is imported. Idempotent.

    Raises:
        PatchError: the installed verl has no legacy actors, or a target has changed.
    """
    if not has_legacy_actors():
        raise PatchError(
            "verl_patches.legacy needs a verl release with legacy actors, 0.7.1, but found "
            f"{installed_release('verl') or 'no verl'}. Fix: remove verl_patches.legacy from VERL_USE_EXTERNAL_MODULES "
            "and legacy from OFFPOLICY_PATCHES; engine workers need no patch."
        )
    for name, actor in PATCHES.items():
        if not is_awaited(actor):
            after_import(actor, partial(_install, name))


def check(strategy: str) -> None:
    """Check the contracts of the legacy actor that ``actor.strategy`` selects against the installed verl.

    Raises:
        NotInstalledError: the Megatron actor is selected, but its dependencies are not installed.
        PatchError: a target has changed.
    """
    try:
        patch = find_patch("megatron_actor" if strategy == "megatron" else "fsdp_actor")
    except ModuleNotFoundError as error:
        if strategy != "megatron" or is_needed(error):
            raise
        raise NotInstalledError(
            f"the legacy Megatron actor needs {error.name}. Fix: install megatron-core and mbridge."
        ) from error
    patch.check()


def status() -> dict[str, str]:
    """Return the state of each patch in this process: "in force", "waiting" for its actor's import, or "off"."""
    return {name: _state(name, actor) for name, actor in PATCHES.items()}


def _install(name: str) -> None:
    find_patch(name).install()


def _state(name: str, actor: str) -> str:
    if is_awaited(actor):
        return "waiting"
    return "in force" if actor in sys.modules and find_patch(name).in_force() else "off"


def find_patch(name: str) -> ReleasePatch:
    """Return a patch. Its module is imported only now, because it imports verl, which loads this package first."""
    patch: ReleasePatch = importlib.import_module(f"{__name__}.{name}").PATCH
    return patch


if "verl_patches.legacy" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()
