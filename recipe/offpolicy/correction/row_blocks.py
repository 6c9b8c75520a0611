"""Blocks of rows: a whole batch is read through temporaries that a CPU's caches hold, however large it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .row_layout import PackedRows, RowLayout, detect_layout

BLOCK = 1 << 17
"""Tokens of a block, padding included. A fresh temporary of more is handed out page by page, which takes longer than
what is computed in it."""


def split_rows(columns: Mapping[str, Tensor], most: int = BLOCK) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Split columns into blocks of whole rows, which share their memory.

    A batch that lies on another device than a CPU is one block, since to cut nested rows is to wait for it.

    Args:
        columns: (B, T) each, or each nested by row.
        most: tokens of a block at most; a longer row is a block by itself.

    Yields:
        The rows of each block, and its columns, in the layout of the given ones.

    Raises:
        ValueError: layouts or shapes that differ.

    Example:
        >>> [(rows.start, rows.stop) for rows, _ in split_rows({"mask": torch.ones(5, 4)}, most=8)]
        [(0, 2), (2, 4), (4, 5)]
    """
    layout = detect_layout(**columns)
    first = next(iter(columns.values()))
    if first.device.type != "cpu" or not layout.count:
        yield slice(0, layout.count), dict(columns)
    elif first.is_nested:
        yield from _split_nested(columns, most)
    else:
        rows = max(most // max(first.shape[1], 1), 1)
        for start in range(0, layout.count, rows):
            block = slice(start, min(start + rows, layout.count))
            yield block, {name: column[block] for name, column in columns.items()}


def split_tokens(
    columns: Mapping[str, Tensor], most: int = BLOCK
) -> Iterator[tuple[slice, RowLayout, dict[str, Tensor]]]:
    """Split columns into blocks of whole rows as ``split_rows``, each with its layout and as tensors of tokens.

    To make a block's nested tensors can take longer than what is computed of it. Where there are several blocks, their
    layouts give nothing back in the layout of the columns.

    Example:
        >>> [tokens["mask"].shape for _, _, tokens in split_tokens({"mask": torch.ones(5, 4)}, most=8)]
        [torch.Size([2, 4]), torch.Size([2, 4]), torch.Size([1, 4])]
    """
    layout = detect_layout(**columns)
    if not isinstance(layout, PackedRows) or layout.offsets.device.type != "cpu" or not layout.count:
        for at, block in split_rows(columns, most):
            whole = detect_layout(**block)
            yield at, whole, {name: whole.tokens(column) for name, column in block.items()}
        return
    tokens = {name: layout.tokens(column) for name, column in columns.items()}
    for at, there in _find_blocks(layout.offsets, most):
        rows = PackedRows(layout.offsets[at.start : at.stop + 1] - there.start, there.stop - there.start, layout.like)
        yield at, rows, {name: column[there] for name, column in tokens.items()}


def _split_nested(columns: Mapping[str, Any], most: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    offsets: Tensor = next(iter(columns.values())).offsets()
    values: dict[str, Tensor] = {name: column.values() for name, column in columns.items()}
    for at, there in _find_blocks(offsets, most):
        here = offsets[at.start : at.stop + 1] - there.start
        lengths = here.diff()
        # Without its longest row torch would pad a block to the number of all its tokens.
        shortest, longest = int(lengths.amin()), int(lengths.amax())
        block = {
            name: torch.nested.nested_tensor_from_jagged(flat[there], here, min_seqlen=shortest, max_seqlen=longest)
            for name, flat in values.items()
        }
        yield at, block


def _find_blocks(offsets: Tensor, most: int) -> Iterator[tuple[slice, slice]]:
    """Find the rows of each block, and their tokens."""
    ends = offsets.tolist()
    start = 0
    while start < len(ends) - 1:
        stop = max(bisect_right(ends, ends[start] + most) - 1, start + 1)
        yield slice(start, stop), slice(ends[start], ends[stop])
        start = stop
