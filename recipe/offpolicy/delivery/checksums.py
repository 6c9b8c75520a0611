"""Checksums of weights that add up over shards, tensor-parallel ranks and fused parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Number of elements that are widened at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAPPERS = re.compile(
    r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_layer|modules_to_save|default)(?=\.|$)"
)


class Checksum(NamedTuple):
    """Sums over the bit patterns b of a tensor's elements, exact in any order.

    Attributes:
        size: number of elements.
        total: sum of b, modulo 2^64.
        squares: sum of b^2, modulo 2^64.
    """

    size: int
    total: int
    squares: int


def add_checksums(parts: Iterable[Checksum]) -> Checksum:
    """Add the checksums of disjoint parts of a tensor, or of several tensors."""
    size = total = squares = 0
    for part in parts:
        size, total, squares = size + part.size, total + part.total, squares + part.squares
    return Checksum(size, _wrap(total), _wrap(squares))


def _wrap(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def sum_bits(tensor: Tensor, dtype: torch.dtype | None = None, device: str | None = None) -> Tensor:
    """Sum the bit patterns of ``tensor`` after rounding it to ``dtype``; chunks are copied to ``device`` for the sum.

    Returns:
        (2,) int64 on that device (default: the tensor's own): sum of the patterns and of their squares, modulo 2^64.
    """
    flat = tensor.detach().reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=device or flat.device)
    for chunk in flat.split(CHUNK):
        bits = chunk.to(sums.device, dtype or chunk.dtype).contiguous()
        bits = bits.view(_BITS[bits.element_size()])
        wide = bits.to(torch.int32 if bits.element_size() < 4 else torch.int64)
        sums[0] += wide.sum(dtype=torch.int64)
        sums[1] += wide.square().sum(dtype=torch.int64)
    return sums


def compute_checksums(
    tensors: Iterable[tuple[str, Tensor, torch.dtype | None]], device: str | None = None
) -> dict[str, Checksum]:
    """Compute the checksum of each named tensor, rounded to the given dtype; see ``sum_bits``."""
    names, counts, sums = [], [], []
    for name, tensor, dtype in tensors:
        names.append(name)
        counts.append(tensor.numel())
        sums.append(sum_bits(tensor, dtype, device))
    if not names:
        return {}
    pairs = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return {name: Checksum(count, *pair) for name, count, pair in zip(names, counts, pairs, strict=True)}


def plain_name(name: str) -> str:
    """Remove the wrappers of FSDP, PEFT, checkpointing and torch.compile from a parameter's name.

    Example:
        >>> plain_name("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    return _WRAPPERS.sub("", name).removeprefix("base_model.model.").removeprefix(".")
