"""Makes "cuda" mean the CPU in the Megatron modules that allocate on "cuda" by name.

They call `torch.zeros(..., device="cuda")` and similar inside functions that cannot be wrapped without copying them.
Therefore these modules, but nothing else in the process, use PyTorch through `CpuTorch`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..contract import Contract, logger
from ..deferred import after_import, is_awaited

MODULES = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Modules that can run on gloo but name the device in their code."""

FACTORIES = ("empty", "ones", "tensor", "zeros")
"""PyTorch functions to which these modules pass the device as an argument."""


CONTRACTS = tuple(
    Contract(
        name="megatron_device",
        target=f"{module}:torch",
        signature=None,
        distribution="megatron-core",
        releases="==0.16.*",
    )
    for module in MODULES
)


class CpuTorch(ModuleType):
    """PyTorch, except that the functions in `FACTORIES` allocate on the CPU when the device is "cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return allocate


def _hand_over(contract: Contract) -> None:
    contract.check()
    module = sys.modules[_module(contract)]
    if not torch.cuda.is_available() and not isinstance(module.torch, CpuTorch):
        module.torch = CpuTorch()  # type: ignore[attr-defined]
        logger.info("patch %s in force in %s", contract.name, module.__name__)


def _module(contract: Contract) -> str:
    return contract.target.partition(":")[0]


def install() -> None:
    """Patch each module now or when it is imported. Idempotent."""
    for contract in CONTRACTS:
        if not is_awaited(_module(contract)):
            after_import(_module(contract), functools.partial(_hand_over, contract))


def waiting() -> bool:
    return any(is_awaited(name) for name in MODULES)


def in_force() -> bool:
    """Return True if a target module has been imported and all imported target modules use `CpuTorch`."""
    imported = [sys.modules[name] for name in MODULES if name in sys.modules]
    return bool(imported) and all(isinstance(module.torch, CpuTorch) for module in imported)
