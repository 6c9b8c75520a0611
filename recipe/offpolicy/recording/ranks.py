"""Choice of the rank that writes rows which several ranks hold, and its number."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch.distributed as dist

_MEGATRON = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Place:
    """Role of a training process.

    Attributes:
        rank: data-parallel rank.
        writes: True on the one process per data-parallel rank that records, whose metrics verl collects.
    """

    rank: int = 0
    writes: bool = True


def place(dp_size: int) -> Place:
    """Return the role of this process, which has computed a loss; with Megatron, only the last pipeline stage does.

    Args:
        dp_size: number of data-parallel ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Place()
    megatron = sys.modules.get(_MEGATRON)
    if megatron is not None and megatron.model_parallel_is_initialized():
        first = megatron.get_tensor_model_parallel_rank() == 0 and megatron.get_context_parallel_rank() == 0
        return Place(megatron.get_data_parallel_rank(), first)
    # Ranks that share sequences (Ulysses) are adjacent, and hold the same rows.
    return among(dist.get_rank(), copies=dist.get_world_size() // dp_size)


def among(global_rank: int, *, copies: int) -> Place:
    """Return the role of a rank if ``copies`` adjacent ranks hold the same rows."""
    return Place(global_rank // copies, global_rank % copies == 0)
