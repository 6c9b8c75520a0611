"""Copy each synchronised weight into its own memory before vLLM loads it.

verl 0.7.1 passes weights to vLLM's process in shared memory, one bucket at a time. The receiver moves each tensor to
its device, reports that the bucket is free, and then loads. On the CPU that move copies nothing: the sender may write
the next bucket over weights that are being loaded, and the segment cannot be closed while they are in use. Later
releases report after loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Contract
from ..releases import specifiers
from .release_patch import ReleasePatch, Wrapping

_MODULE = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"


class Buffer(torch.Tensor):
    """A tensor whose `to` always copies, as from the host to an accelerator; its views are such tensors too."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to(*args, **kwargs).clone()


def _rebuild(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    tensor, segment = original(*args, **kwargs)
    return tensor.as_subclass(Buffer), segment


PATCH = ReleasePatch(
    (
        Wrapping(
            _rebuild,
            Contract(
                name="weight_buffer",
                target=f"{_MODULE}:rebuild_shared_memory",
                signature="(name, size, dtype=torch.uint8)",
                distribution="verl",
                releases=specifiers(lambda release: release.legacy_actors),
            ),
        ),
    ),
    cause=lambda release: release.legacy_actors,
    after=_MODULE,
)
