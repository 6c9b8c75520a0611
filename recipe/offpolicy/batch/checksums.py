"""A hash of each row's tokens with the values of a column, computed on their device.

Sum over a row's tokens of mix(mix(2^32 place + token) + seed + bits of the value), where place is the number of the
row's response tokens up to it and the seed depends on the precision. ``mix`` is the finaliser of SplitMix64 (Steele,
Lea, Flood 2014, Fast Splittable Pseudorandom Number Generators), a bijection of 64 bits, in wrapping int64. The hash
protects against mistakes, not against deliberate collisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..correction.row_blocks import split_tokens
from ..correction.row_layout import PackedRows, RowLayout

_BITS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with as many bytes as a float of each dtype."""
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
    """Hash each row's tokens, (B,) int64: 0 for a row without a token in the mask; values outside the mask are ignored.

    It changes with any token, any bit of a value, their order, or the dtype of the values.

    Args:
        tokens: (B, T) integers, or nested by row, like the other columns.
        mask: (B, T) bool or 0/1.
        values: (B, T) of the float dtypes that training uses.

    Raises:
        KeyError: values of another dtype.
        ValueError: layouts or shapes that differ.
    """
    return hash_columns(tokens, mask, [values])[:, 0]


@torch.no_grad()
def hash_columns(tokens: Tensor, mask: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Hash each of several columns like ``hash_rows``: (B, C) int64.

    Args:
        tokens, mask: as in ``hash_rows``.
        columns: (B, T) each, of one dtype, or nested by row.
    """
    given = {"tokens": tokens, "mask": mask} | {str(i): column.detach() for i, column in enumerate(columns)}
    return torch.cat([_hash_block(rows, **block) for _, rows, block in split_tokens(given)])


def _hash_block(rows: RowLayout, tokens: Tensor, mask: Tensor, **columns: Tensor) -> Tensor:
    there = mask.bool()
    values = torch.stack([*columns.values()])
    at = _mix((rows.cumulative_count(there) << 32).bitwise_or_(tokens)).add_(_SEEDS[values.dtype])
    mixed = _mix(at + values.view(_BITS[values.element_size()])).mul_(there)
    if not isinstance(rows, PackedRows):
        return mixed.sum(-1).T
    # The sum up to each row's end minus that up to its start: both wrap around, and so does their difference.
    up_to = torch.cat((mixed.new_zeros(len(mixed), 1), mixed.cumsum(-1)), dim=-1)
    return up_to[:, rows.offsets].diff().T


@torch.no_grad()
def hash_numbers(values: Tensor) -> Tensor:
    """Hash the numbers of each row in order, (B,) int64: values (B,) or (B, K) of any dtype."""
    numbers = values.detach().reshape(len(values), -1)
    bits = numbers.view(_BITS[numbers.element_size()]) if numbers.is_floating_point() else numbers
    found = torch.zeros(len(numbers), dtype=torch.int64, device=numbers.device)
    for column in bits.long().unbind(-1):
        found = _mix(found + column + _FIRST)
    return found


def _mix(value: Tensor) -> Tensor:
    """Mix the bits in place, except for temporaries."""
    value ^= _shifted(value, 30)
    value *= _FIRST
    value ^= _shifted(value, 27)
    value *= _SECOND
    value ^= _shifted(value, 31)
    return value


def _shifted(value: Tensor, by: int) -> Tensor:
    """Shift right logically, zeros from the left: torch's own shift repeats the sign."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)
