"""Let FSDP1 broadcast a model on the CPU from rank 0.

verl configures FSDP1 to synchronise module states. PyTorch rejects that for parameters on the CPU, because it expects
an NCCL process group; over gloo the broadcast itself works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping


def _check(original: Callable[..., None], module_states: Any) -> None:
    if torch.accelerator.is_available():
        original(module_states)


PATCH = ReleasePatch(
    (
        Wrapping(
            _check,
            Contract(
                name="sync_module_states",
                target="torch.distributed.fsdp._init_utils:_check_module_states_for_sync_module_states",
                signature="(module_states)",
                distribution="torch",
                releases=">=2.13,<2.14",
            ),
        ),
    ),
)
