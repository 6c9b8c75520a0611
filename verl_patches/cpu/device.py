"""Names for the CPU where verl expects an accelerator: Ray's resource "GPU", and gloo instead of NCCL.

Before 0.9 verl has no platforms. Without an accelerator its device is `cpu`, and two of its answers are wrong then: the
resource is "NPU", which no placement group requests, and the backend is "nccl".
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..contract import Contract, PatchError
from ..releases import specifiers
from .release_patch import ReleasePatch, Wrapping

_DEVICE = "verl.utils.device"


def _contract(function: str) -> Contract:
    return Contract("device", f"{_DEVICE}:{function}", "()", "verl", specifiers(lambda release: not release.platforms))


def _gpu(original: Callable[[], str]) -> str:
    return "GPU"


def _gloo(original: Callable[[], str]) -> str:
    return "gloo"


class _DevicePatch(ReleasePatch):
    def install(self) -> None:
        """Wrap the two functions.

        Raises:
            PatchError: a target has moved, or there is an accelerator, which these releases always use.
        """
        if self.needed() and torch.cuda.is_available():
            raise PatchError(
                "VERL_PLATFORM=cpu on a machine with a GPU: verl before 0.9 uses any GPU that it sees. Fix: unset "
                "VERL_PLATFORM and VERL_USE_EXTERNAL_MODULES to train on the GPU, or use verl 0.9.1."
            )
        super().install()


PATCH = _DevicePatch(
    (Wrapping(_gpu, _contract("get_resource_name")), Wrapping(_gloo, _contract("get_nccl_backend"))),
    cause=lambda release: not release.platforms,
)
