"""Let verl open its process group if the accelerator is the CPU.

verl requests f"cpu:gloo,{device}:{backend}", here "cpu:gloo,cpu:gloo", and PyTorch rejects a device that is named twice
(verl-project/verl#6237).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Contract
from .release_patch import ReleasePatch, Wrapping

CONTRACT = Contract(
    name="process_group",
    target="torch.distributed:init_process_group",
    signature=(
        "(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, "
        "group_name='', pg_options=None, device_id=None, _ranks=None)"
    ),
    distribution="torch",
    releases=">=2.13,<2.14",
)


def _once_per_device(backend: str | None) -> str | None:
    """Remove repeated "device:backend" parts from a backend string; other values are returned unchanged."""
    if backend is None:
        return None
    return ",".join(dict.fromkeys(backend.split(",")))


def _init_process_group(original: Callable[..., None], backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    original(_once_per_device(backend), *args, **kwargs)


PATCH = ReleasePatch((Wrapping(_init_process_group, CONTRACT),))
