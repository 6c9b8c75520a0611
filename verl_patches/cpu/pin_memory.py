"""Turn off memory pinning in FSDP2's CPU offload, which needs an accelerator.

verl builds its reference model with `CPUOffloadPolicy(pin_memory=True)`; without an accelerator PyTorch
raises "Cannot access accelerator device when none is available".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

CONTRACT = Contract(
    name="pin_memory",
    target="torch.distributed.fsdp:CPUOffloadPolicy.__init__",
    signature="(self, pin_memory=True)",
    distribution="torch",
    releases=">=2.13,<2.14",
)


def _unpinned(original: Callable[..., None], self: Any, pin_memory: bool = True) -> None:
    original(self, pin_memory=False)


PATCH = ReleasePatch((Wrapping(_unpinned, CONTRACT),))
