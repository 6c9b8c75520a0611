"""Implement the part of `torch.cuda` that Megatron calls, if PyTorch was built without CUDA.

Megatron gets the allocation device from `torch.cuda`, synchronises and seeds it, whatever device the run uses. The
stand-ins are installed when a process sets up Megatron's process groups. Importing verl also imports Megatron; a
process that does only that keeps PyTorch's own functions, which raise without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..contract import Contract, logger
from .release_patch import ReleasePatch, Wrapping

CONTRACT = Contract(
    name="megatron_cuda",
    target="megatron.core.parallel_state:initialize_model_parallel",
    signature=(
        "(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, "
        "pipeline_model_parallel_comm_backend=None, use_sharp=False, context_parallel_size=1, "
        "hierarchical_context_parallel_sizes=None, hybrid_context_parallel=False, expert_model_parallel_size=1, "
        "num_distributed_optimizer_instances=1, expert_tensor_parallel_size=None, "
        "nccl_communicator_config_path=None, distributed_timeout_minutes=30, order='tp-cp-ep-dp-pp', "
        "get_embedding_ranks=None, get_position_embedding_ranks=None, create_gloo_process_groups=True, "
        "high_priority_stream_groups=None, sharp_enabled_group=None, create_all_gather_group=False)"
    ),
    distribution="megatron-core",
    releases="==0.16.*",
)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a stand-in for calls without meaning on the CPU."""


STAND_INS: dict[str, Callable[..., Any]] = {
    # Megatron passes it to `device=` and to `.to()`.
    "current_device": lambda: torch.device("cpu"),
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda new_state, *_, **__: torch.set_rng_state(new_state),
}


def _on_the_host(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Replace `Tensor.cuda`: return the tensor, which is already on the host."""
    return self


def _initialize(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not torch.cuda.is_available():
        for name, stand_in in STAND_INS.items():
            setattr(torch.cuda, name, stand_in)
        torch.Tensor.cuda = _on_the_host  # type: ignore[method-assign, assignment]
        logger.info("patch %s: torch.cuda is answered for by the CPU", CONTRACT.name)
    original(*args, **kwargs)


PATCH = ReleasePatch((Wrapping(_initialize, CONTRACT),), after="megatron.core.parallel_state")
