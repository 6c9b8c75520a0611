"""Blocks of rows: a whole batch is read through temporaries that a CPU's caches hold, however large it is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from torch import Tensor

from .row_layout import PackedRows, PaddedRows, RowLayout, detect_layout

BLOCK = 1 << 17
"""Tokens of a block, padding included. A fresh temporary of more is handed out page by page, which takes longer than
what is computed in it."""


def split_tokens(
    columns: Mapping[str, Tensor], most: int = BLOCK
) -> Iterator[tuple[slice, RowLayout, dict[str, Tensor]]]:
    """Split columns into blocks of whole rows, as tensors of tokens that share the columns' memory.

    A block of nested rows is not nested itself: to nest it can take longer than what is computed of it, and the layout
    of one of several gives nothing back in the layout of the columns. A batch that lies on another device than a CPU is
    one block, since to cut nested rows is to wait for it.

    Args:
        columns: (B, T) each, or each nested by row.
        most: tokens of a block at most; a longer row is a block by itself.

    Yields:
        The rows of each block, how its tokens lie, and the tokens of each column.

    Raises:
        ValueError: layouts or shapes that differ.

    Example:
        >>> import torch
        >>> [tokens["mask"].shape for _, _, tokens in split_tokens({"mask": torch.ones(5, 4)}, most=8)]
        [torch.Size([2, 4]), torch.Size([2, 4]), torch.Size([1, 4])]
    """
    layout = detect_layout(**columns)
    tokens = {name: layout.tokens(column) for name, column in columns.items()}
    first = next(iter(tokens.values()))
    if first.device.type != "cpu" or not layout.count:
        yield slice(0, layout.count), layout, tokens
    elif isinstance(layout, PackedRows):
        for at, there in _find_blocks(layout.offsets, most):
            offsets = layout.offsets[at.start : at.stop + 1] - there.start
            rows = PackedRows(offsets, there.stop - there.start, layout.like)
            yield at, rows, {name: column[there] for name, column in tokens.items()}
    else:
        height = max(most // max(first.shape[1], 1), 1)
        for start in range(0, layout.count, height):
            at = slice(start, min(start + height, layout.count))
            yield at, PaddedRows(first[at].shape), {name: column[at] for name, column in tokens.items()}


def _find_blocks(offsets: Tensor, most: int) -> Iterator[tuple[slice, slice]]:
    """Find the rows of each block, and their tokens."""
    ends = offsets.tolist()
    start = 0
    while start < len(ends) - 1:
        stop = max(bisect_right(ends, ends[start] + most) - 1, start + 1)
        yield slice(start, stop), slice(ends[start], ends[stop])
        start = stop
