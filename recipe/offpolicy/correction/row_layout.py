"""Layouts of a batch's tokens, padded to one width or packed end to end, and how they are split into blocks of rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ONE_LAYOUT = "Pass all of them padded, or all of them as torch.nested tensors of layout torch.jagged."


@dataclass(frozen=True)
class PaddedRows:
    """Row-wise operations on tokens as (B, T), with all rows padded to the same width.

    A tensor of tokens is (B, T) if padded and (N,) if packed. A column has one value per row, (B, 1) if padded and (B,)
    if packed. None of these operations synchronises with the device.
    """

    shape: torch.Size

    @property
    def count(self) -> int:
        """B, the number of rows."""
        return self.shape[0]

    def tokens(self, given: Tensor) -> Tensor:
        """Return the tensor of tokens that a caller's tensor contains."""
        return given

    def to_given_layout(self, tokens: Tensor) -> Tensor:
        """Convert a tensor of tokens to the layout of the caller's tensors."""
        return tokens

    def to_column(self, by_row: Tensor) -> Tensor:
        """Return a (B,) tensor as a column."""
        return by_row[:, None]

    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each row's tokens: a column, float64."""
        if tokens.dtype is torch.bool:
            return tokens.view(torch.uint8).sum(-1, keepdim=True).double()
        return tokens.sum(-1, keepdim=True, dtype=torch.float64)

    def min(self, tokens: Tensor) -> Tensor:
        """Compute each row's minimum, for integers: a column of that dtype; an empty row has the dtype's maximum."""
        if not self.shape[1]:
            return tokens.new_full((self.count, 1), torch.iinfo(tokens.dtype).max)
        return tokens.amin(-1, keepdim=True)

    def max(self, tokens: Tensor) -> Tensor:
        """Compute the maximum of each row: a float64 column, -inf for an empty row."""
        if not self.shape[1]:
            return tokens.new_full((self.count, 1), float("-inf"), dtype=torch.float64)
        return tokens.amax(-1, keepdim=True).double()

    def broadcast(self, column: Tensor) -> Tensor:
        """Return a column in a shape that broadcasts against tensors of tokens."""
        return column

    def equals_previous(self, tokens: Tensor) -> Tensor:
        """Flag the tokens that have the same value as the previous token in the row."""
        same = torch.zeros_like(tokens, dtype=torch.bool)
        same[:, 1:] = tokens[:, 1:] == tokens[:, :-1]
        return same

    def cumulative_count(self, flags: Tensor) -> Tensor:
        """Compute the running count of set flags in each row, including the current token: int64."""
        return flags.cumsum(-1)

    def cumulative_sum(self, tokens: Tensor) -> Tensor:
        """Compute the running sum of each row, including the current token: float64."""
        return tokens.cumsum(-1, dtype=torch.float64)

    def cumulative_max(self, tokens: Tensor) -> Tensor:
        """Compute the running maximum of each row, including the current token: float64."""
        return tokens.double().cummax(-1).values if self.shape[1] else tokens.double()

    def previous(self, tokens: Tensor, first: float) -> Tensor:
        """Return the value of the previous token in the row; ``first`` for the first token."""
        return torch.nn.functional.pad(tokens, (1, 0), value=first)[:, :-1]

    def sort(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Sort the tokens of each row by value; return them and their former positions along the last dimension."""
        ordered, order = tokens.sort(dim=-1, stable=True)
        return ordered, order

    def to_position(self, number: Tensor) -> Tensor:
        """Convert the index of a token within its row, from 0, to its position along the last dimension."""
        return number


@dataclass(frozen=True)
class PackedRows:
    """The same operations on packed tokens, (N,), whose rows are stored end to end.

    Attributes:
        offsets: (B + 1,) integers: the start of each row, then N.
        length: N.
        like: one of the caller's nested tensors.
    """

    offsets: Tensor
    length: int
    like: Tensor
    _known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def row_index(self) -> Tensor:
        """(N,) int64, the row of each token."""
        # This is not a cached property, because a cached property's lock cannot be compiled.
        if "row_index" not in self._known:
            self._known["row_index"] = torch.repeat_interleave(self.offsets.diff(), output_size=self.length)
        return self._known["row_index"]

    def tokens(self, given: Tensor) -> Tensor:
        return given.values()

    def to_given_layout(self, tokens: Tensor) -> Tensor:
        # A nested tensor made only from offsets does not store its longest row's length, and torch would pad it to the
        # total number of tokens.
        nested = torch.empty_like(self.like, dtype=tokens.dtype, requires_grad=False)
        nested.values().copy_(tokens)
        return nested

    def to_column(self, by_row: Tensor) -> Tensor:
        return by_row

    def sum(self, tokens: Tensor) -> Tensor:
        # The sums are computed by segment, because the last digits of atomic additions on a GPU would differ from run
        # to run.
        return torch.segment_reduce(tokens.double(), "sum", offsets=self.offsets, initial=0, unsafe=True)

    def min(self, tokens: Tensor) -> Tensor:
        least = tokens.new_full((self.count,), torch.iinfo(tokens.dtype).max)
        return least.scatter_reduce_(0, self.row_index, tokens, "amin")

    def max(self, tokens: Tensor) -> Tensor:
        greatest = tokens.new_full((self.count,), float("-inf"), dtype=torch.float64)
        return greatest.scatter_reduce_(0, self.row_index, tokens.double(), "amax")

    def broadcast(self, column: Tensor) -> Tensor:
        return column.index_select(0, self.row_index)

    def equals_previous(self, tokens: Tensor) -> Tensor:
        same = torch.zeros_like(tokens, dtype=torch.bool)
        same[1:] = (tokens[1:] == tokens[:-1]) & (self.row_index[1:] == self.row_index[:-1])
        return same

    def cumulative_count(self, flags: Tensor) -> Tensor:
        total = flags.cumsum(0)
        before = torch.cat((total.new_zeros(1), total)).index_select(0, self.offsets[:-1])
        return total - self.broadcast(before)

    def cumulative_sum(self, tokens: Tensor) -> Tensor:
        return self._scan(tokens.double(), torch.add, 0.0)

    def cumulative_max(self, tokens: Tensor) -> Tensor:
        return self._scan(tokens.double(), torch.maximum, -math.inf)

    def _scan(self, values: Tensor, combine: Callable[[Tensor, Tensor], Tensor], neutral: float) -> Tensor:
        """Compute an inclusive prefix scan of each row, in log2(N) passes with doubling distance."""
        # A single cumulative sum, minus its value at each row's start, would lose digits in short rows.
        distance = 1
        while distance < self.length:
            alike = self.row_index[distance:] == self.row_index[:-distance]
            before = torch.where(alike, values[:-distance], neutral)
            values = torch.cat((values[:distance], combine(values[distance:], before)))
            distance *= 2
        return values

    def previous(self, tokens: Tensor, first: float) -> Tensor:
        before = torch.nn.functional.pad(tokens, (1, 0), value=first)[:-1]
        starts = torch.nn.functional.pad(self.row_index.diff() > 0, (1, 0), value=True)[: self.length]
        return torch.where(starts, first, before)

    def sort(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        by_value = tokens.argsort(stable=True)
        order = by_value[self.row_index[by_value].argsort(stable=True)]
        return tokens[order], order

    def to_position(self, number: Tensor) -> Tensor:
        return number + self.broadcast(self.offsets[:-1])


RowLayout = PaddedRows | PackedRows


def detect_layout(**given: Tensor) -> RowLayout:
    """Detect the layout of these tensors, each (B, T), or nested by row with layout ``torch.jagged``.

    Raises:
        ValueError: layouts, shapes or row lengths differ.

    Example:
        >>> detect_layout(a=torch.zeros(2, 3)).count
        2
        >>> detect_layout(a=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(1)], layout=torch.jagged)).count
        2
    """
    packed = [name for name, tensor in given.items() if tensor.is_nested]
    if not packed:
        shape = next(iter(given.values())).shape
        # The shapes are compared without hashing, which would fix the sizes of a compiled graph.
        if len(shape) != 2 or any(tensor.shape != shape for tensor in given.values()):
            shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
            raise ValueError(f"expected tensors of one shape (B, T), got {shapes}")
        return PaddedRows(shape)
    if len(packed) != len(given):
        padded = [name for name in given if name not in packed]
        raise ValueError(f"{', '.join(packed)} are nested, {', '.join(padded)} are not. {_ONE_LAYOUT}")
    for name, tensor in given.items():
        if tensor.layout is not torch.jagged or tensor.dim() != 2 or _is_narrowed(tensor):
            raise ValueError(
                f"{name} is nested with layout {tensor.layout} and {tensor.dim()} dimensions: expected rows of tokens "
                "stored end to end. Pass torch.nested.nested_tensor(list of (T,) tensors, layout=torch.jagged), or "
                f"{name}.contiguous() if the tensor is narrowed."
            )
    return _packed_rows(given)


def count_tokens_by_row(tokens: Tensor) -> Tensor:
    """Count each row's true tokens, (B,) float64; ``tokens`` is bool or 0/1, and is (B, T) or nested by row.

    Example:
        >>> count_tokens_by_row(torch.tensor([[1, 1, 0], [1, 0, 0]])).tolist()
        [2.0, 1.0]
    """
    rows = detect_layout(tokens=tokens)
    return rows.sum(rows.tokens(tokens)).flatten()


def spread_over_tokens(by_row: Tensor, like: Tensor) -> Tensor:
    """Spread one value per row, (B,), over the tokens of ``like``, (B, T) or nested by row.

    Example:
        >>> spread_over_tokens(torch.tensor([5, 7]), torch.zeros(2, 2)).tolist()
        [[5, 5], [7, 7]]
    """
    rows = detect_layout(like=like)
    tokens = rows.tokens(like)
    return rows.to_given_layout(rows.broadcast(rows.to_column(by_row.to(tokens.device))).expand(tokens.shape))


def _packed_rows(given: dict[str, Tensor]) -> PackedRows:
    first, *others = given
    offsets, length = _offsets(given[first]), given[first].values().shape[0]
    for name in others:
        theirs, here = _offsets(given[name]), given[name].values().shape[0]
        if theirs is offsets and here == length:
            continue
        alike = theirs.shape == offsets.shape and here == length
        if alike and (offsets.device.type != "cpu" or torch.compiler.is_compiling()):
            # This is checked on the device, because reading the result on the host would synchronise with the device.
            torch._assert_async((theirs == offsets).all(), f"rows of {name} and {first} differ in length")
        elif not alike or not torch.equal(theirs, offsets):
            raise ValueError(
                f"rows of {name} ({len(theirs) - 1} of {here} tokens in all) differ in length from those of {first} "
                f"({len(offsets) - 1} of {length}): expected nested tensors with equal offsets."
            )
    return PackedRows(offsets, length, given[first])


def _offsets(nested: Any) -> Tensor:
    offsets: Tensor = nested.offsets()
    return offsets


def _is_narrowed(nested: Any) -> bool:
    """Return True if the tensor has values that belong to no row."""
    return nested.lengths() is not None


BLOCK = 1 << 17
"""Number of tokens in a block, including padding. Memory for a larger temporary tensor is allocated page by page, which
takes longer than the computation itself."""


def split_tokens(
    columns: Mapping[str, Tensor], most: int = BLOCK
) -> Iterator[tuple[slice, RowLayout, dict[str, Tensor]]]:
    """Split columns into blocks of whole rows, as tensors of tokens that share the columns' memory.

    A block of nested rows is not nested itself, because nesting can take longer than the computation on the block. If
    there are several blocks, results therefore cannot be converted back to nested tensors. A batch on an accelerator is
    one block, because splitting nested rows synchronises with the device.

    Args:
        columns: (B, T) each, or each nested by row.
        most: maximum number of tokens in a block; a longer row is its own block.

    Yields:
        The rows of each block, the layout of its tokens, and the tokens of each column.

    Raises:
        ValueError: layouts or shapes differ.

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
