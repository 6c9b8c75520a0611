"""Make a snapshot of FSDP2 weights a copy if the weights are on the CPU.

verl's asynchronous trainer keeps the weights of the last synchronisation to compute pi_old with, by
`param.detach().cpu()`. On the CPU this is the live parameter itself, so pi_old silently becomes the current policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Contract
from ..engine_loss import RELEASES
from .release_patch import ReleasePatch, Wrapping

_MODULE = "verl.utils.fsdp_utils"
CONTRACT = Contract(
    name="async_snapshot",
    target=f"{_MODULE}:fsdp2_sharded_save_to_cpu",
    signature="(model)",
    distribution="verl",
    releases=RELEASES,
)


def _copied(original: Callable[[Any], tuple[dict[str, Any], Any]], model: Any) -> tuple[dict[str, Any], Any]:
    shards, layout = original(model)
    return {name: (shard.clone(), spec) for name, (shard, spec) in shards.items()}, layout


PATCH = ReleasePatch((Wrapping(_copied, CONTRACT),), after=_MODULE)
