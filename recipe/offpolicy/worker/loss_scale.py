"""Factor by which verl's engine must multiply the corrected loss before its backward pass."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu


def expected_scale(loss: Tensor, data: TensorDict) -> Tensor | float | None:
    """Compute the expected gradient at the loss of a micro-batch in the engine's backward pass.

    verl's loss has the denominators of the whole mini-batch, so gradient accumulation does not scale it. FSDP starts
    with 1, or with the loss scale of fp16 training. verl's Megatron engine multiplies by the number of micro-batches,
    by which Megatron's schedule divides. The schedule multiplies by the number of context-parallel ranks, over which
    gradients are averaged, or verl by the routed tokens, by which they are divided; then follows the loss scale.

    Args:
        loss: scalar.
        data: the micro-batch as the engine hands it to its loss, which calls this function.

    Returns:
        The factor, as a tensor on the device if reading it would make the host wait; None if it is unknown, for example
        with Megatron's dynamic context parallelism.
    """
    engine = _find_engine()
    if (scaler := getattr(engine, "scaler", None)) is not None:
        scaled: Tensor = scaler.scale(torch.ones_like(loss, requires_grad=False))
        return scaled
    # Only Megatron's engines store the number of micro-batches in a micro-batch.
    if "num_micro_batch" not in data.keys():
        return 1.0
    if engine is None or getattr(engine.engine_config, "dynamic_context_parallel", False):
        return None
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    if (routed := tu.get_non_tensor_data(data, "routed_num_tokens", None)) is not None:
        scale = float(routed) / float(tu.get_non_tensor_data(data, "dp_size", 1))
    else:
        scale = float(parallel_state.get_context_parallel_world_size())
    grad_scale = get_model_config(engine.module[0]).grad_scale_func
    return scale if grad_scale is None else scale * grad_scale(torch.ones_like(loss, requires_grad=False))


def _find_engine() -> Any:
    """Find verl's engine among the callers; it hands its loss everything except itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if hasattr(owner := frame.f_locals.get("self"), "forward_backward_batch"):
            return owner
        frame = frame.f_back
    return None
