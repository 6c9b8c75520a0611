"""Run unmodified verl and vLLM without an accelerator. verl itself loads this package into every process:

    VERL_USE_EXTERNAL_MODULES=verl_patches.cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda

In 0.9 and later, the last two are verl's own variables: they select the platform, and the device whose engines are used
(verl registers no engine for cpu; the engines for cuda run there). In earlier releases, this package reads both
variables. Without VERL_PLATFORM=cpu, importing this package changes nothing.

A patch is either an object in a module's table `PATCHES`, or a module of its own. It has `install()` and `in_force()`,
and may have `waiting()`, for a target that is not imported yet, and `needed()`, for a patch that some releases do not
need.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..contract import PatchError

_TABLES = {
    "of_torch": ("process_group", "pin_memory", "sync_module_states", "vllm_version"),
    "of_verl": (
        *("device", "engine_device", "layer_names", "padding", "autocast"),
        *("weight_socket", "weight_buffer", "async_snapshot"),
    ),
    "of_vllm": ("vllm_weights", "vllm_fused_moe", "vllm_routes", "vllm_expert_weights"),
    "of_megatron": (
        *("megatron_cuda", "megatron_rng", "megatron_optimizer"),
        *("megatron_attention", "megatron_bridge", "megatron_rope"),
    ),
}
_TABLE_OF = {name: table for table, names in _TABLES.items() for name in names}
PATCHES = ("torch_cpu", "platform", *_TABLE_OF, "megatron_device")
REQUIRED_ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}


def install() -> None:
    """Install the group in this process. Idempotent.

    Raises:
        PatchError: the environment selects another platform, or a target has moved.
    """
    wrong = {key: value for key, value in REQUIRED_ENVIRONMENT.items() if os.environ.get(key) != value}
    if wrong:
        found = ", ".join(f"{key}={os.environ.get(key)!r}" for key in wrong)
        raise PatchError(
            f"verl_patches.cpu makes verl run on the CPU and needs "
            f"{' '.join(f'{key}={value}' for key, value in wrong.items())}, found {found}. Fix: export "
            f"it before the run, or remove verl_patches.cpu from VERL_USE_EXTERNAL_MODULES."
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


def _state(patch: Any) -> str:
    if not getattr(patch, "needed", lambda: True)():
        return "not needed"
    if patch.in_force():
        return "in force"
    return "waiting" if getattr(patch, "waiting", lambda: False)() else "off"


def find_patch(name: str) -> Any:
    """Return a patch, importing it only now because patches import torch and verl."""
    if (table := _TABLE_OF.get(name)) is not None:
        return importlib.import_module(f"{__name__}.{table}").PATCHES[name]
    return importlib.import_module(f"{__name__}.{name}")


_asked_for = "verl_patches.cpu" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
if _asked_for or os.environ.get("VERL_PLATFORM") == "cpu":
    install()
