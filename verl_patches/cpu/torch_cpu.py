"""Gives `torch.cpu` the part of `torch.cuda`'s memory and random-number API that verl calls.

verl reaches its device through `get_torch_device()`, here `torch.cpu`, and calls functions that PyTorch defines for
accelerators only. Only missing functions are added, so a future function of PyTorch takes precedence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Contract, logger

MODULE = Contract(
    name="torch_cpu",
    target="torch:cpu.is_available",
    signature="()",
    distribution="torch",
    releases=">=2.13,<2.14",
)
_added: set[str] = set()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a stand-in for calls that have no meaning on the CPU."""


def _resident(*_: Any, **__: Any) -> int:
    """Return the resident memory of this process in bytes, instead of memory allocated on the device."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


API: dict[str, Callable[..., Any]] = {
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "reset_peak_memory_stats": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "memory_allocated": _resident,
    "memory_reserved": _resident,
    "max_memory_allocated": _resident,
    "max_memory_reserved": _resident,
    "mem_get_info": _free_and_total,
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "manual_seed_all": lambda seed: torch.manual_seed(seed),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "get_device_name": lambda *_, **__: "CPU",
}


def install() -> None:
    """Add each missing function to `torch.cpu`, once."""
    MODULE.check()
    missing = [name for name in API if not hasattr(torch.cpu, name)]
    for name in missing:
        setattr(torch.cpu, name, API[name])
    _added.update(missing)
    if missing:
        logger.info("patch %s in force: added %s to torch.cpu", MODULE.name, ", ".join(missing))


def in_force() -> bool:
    return bool(_added)
