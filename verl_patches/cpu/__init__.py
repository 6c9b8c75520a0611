"""Runs unmodified verl and vLLM without an accelerator. Loaded into every process by verl itself:

    VERL_USE_EXTERNAL_MODULES=verl_patches.cpu VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda

The last two are verl's own switches: the platform to use, and the engines to take (there is none registered
for cpu; those for cuda run on it). Without VERL_PLATFORM=cpu, importing this package changes nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..contract import PatchError

PATCHES = ("torch_cpu", "platform", "process_group", "pin_memory", "vllm_version", "vllm_weights")
REQUIRED_ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}


def install() -> None:
    """Installs the group in this process. Idempotent.

    Raises:
        PatchError: the environment asks for another platform, or a target has moved.
    """
    wrong = {key: value for key, value in REQUIRED_ENVIRONMENT.items() if os.environ.get(key) != value}
    if wrong:
        found = ", ".join(f"{key}={os.environ.get(key)!r}" for key in wrong)
        raise PatchError(
            f"verl_patches.cpu makes verl run on the CPU and needs "
            f"{' '.join(f'{key}={value}' for key, value in wrong.items())}, found {found}. Fix: export "
            f"it before the run, or take verl_patches.cpu out of VERL_USE_EXTERNAL_MODULES."
        )
    for name in PATCHES:
        _patch(name).install()


def status() -> dict[str, str]:
    """State of each patch in this process: "in force", "waiting" for its target's import, or "off"."""
    if os.environ.get("VERL_PLATFORM") != "cpu":
        return dict.fromkeys(PATCHES, "off")
    return {name: _state(_patch(name)) for name in PATCHES}


def _state(patch: Any) -> str:
    if patch.in_force():
        return "in force"
    return "waiting" if getattr(patch, "waiting", lambda: False)() else "off"


def _patch(name: str) -> Any:
    # Imported late: they import torch and verl, which a look at this package should not cost.
    return importlib.import_module(f"{__name__}.{name}")


_asked_for = "verl_patches.cpu" in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
if _asked_for or os.environ.get("VERL_PLATFORM") == "cpu":
    install()
