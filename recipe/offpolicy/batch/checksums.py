"""A hash of each row's tokens with their log-probs, computed where they are.

Sum over a row's tokens of mix(mix(mix(seed + place) + token) + bits of log mu), with place the number of the row's
response tokens up to it, and a seed for each precision of mu. ``mix`` is the finaliser of SplitMix64 (Steele, Lea,
Flood 2014, Fast Splittable Pseudorandom Number Generators), a bijection of 64 bits, in int64 that wraps around. It
guards against mistakes, not against somebody who looks for a collision.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..correction.row_blocks import split_tokens
from ..correction.row_layout import PackedRows, RowLayout

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as a float of any dtype has."""
_SEEDS: Final = {
    torch.float64: 0x243F6A8885A308D3,
    torch.float32: 0x13198A2E03707344,
    torch.bfloat16: 0x24093822299F31D0,
    torch.float16: 0x082EFA98EC4E6C89,
}
_FIRST: Final = 0xBF58476D1CE4E5B9 - 2**64
_SECOND: Final = 0x94D049BB133111EB - 2**64


@torch.no_grad()
def hash_rows(tokens: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """Hash each row's tokens, (B,) int64: 0 for a row without a token in the mask; positions off the mask are not read.

    It differs where a token, a bit of a value, their order, or the dtype of the values does.

    Args:
        tokens: (B, T) integers, or nested by row, as the others.
        mask: (B, T) bool or 0/1.
        values: (B, T) of the float dtypes that training uses.

    Raises:
        KeyError: values of another dtype.
        ValueError: layouts or shapes that differ.
    """
    columns = {"tokens": tokens, "mask": mask, "values": values.detach()}
    return torch.cat([_hash_block(rows, **block) for _, rows, block in split_tokens(columns)])


def _hash_block(rows: RowLayout, tokens: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    there = mask.bool()
    place = rows.cumulative_count(there).add_(_SEEDS[values.dtype])
    bits = values.view(_BITS[values.element_size()])
    mixed = _mix(_mix(_mix(place).add_(tokens)).add_(bits)).mul_(there)
    if not isinstance(rows, PackedRows):
        return mixed.sum(-1)
    # The sum up to each row's end less that up to its start: both wrap around, and so does their difference.
    up_to = torch.cat((mixed.new_zeros(1), mixed.cumsum(0)))
    return up_to[rows.offsets].diff()


def _mix(value: Tensor) -> Tensor:
    """Mix the bits in place, but for temporaries."""
    value ^= _shifted(value, 30)
    value *= _FIRST
    value ^= _shifted(value, 27)
    value *= _SECOND
    value ^= _shifted(value, 31)
    return value


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shift right logically, zeros from the left: torch's own shift repeats the sign."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)
