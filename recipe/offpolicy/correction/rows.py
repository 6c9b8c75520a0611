"""How the tokens of a batch lie in its rows: padded to one width, or packed end to end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ONE_LAYOUT = "Pass all of them padded, or all of them as torch.nested tensors of layout torch.jagged."


class Rows(ABC):
    """What a sum by row, or the neighbour of a token, is in one layout.

    A tensor of tokens is (B, T) where padded and (N,) where packed; a column holds one value a row, (B, 1) where padded
    and (B,) where packed. Nothing here waits for the device.
    """

    @property
    @abstractmethod
    def count(self) -> int:
        """B, the number of rows."""

    @abstractmethod
    def tokens(self, given: Tensor) -> Tensor:
        """The tensor of tokens behind one that a caller gave."""

    @abstractmethod
    def as_given(self, tokens: Tensor) -> Tensor:
        """A tensor of tokens in the layout of what the caller gave."""

    @abstractmethod
    def column(self, by_row: Tensor) -> Tensor:
        """(B,) as a column."""

    @abstractmethod
    def sum(self, tokens: Tensor) -> Tensor:
        """Sum over each row's tokens: a column, float64."""

    @abstractmethod
    def least(self, tokens: Tensor) -> Tensor:
        """Least integer of each row: a column of their type, its greatest number for a row of no length."""

    @abstractmethod
    def greatest(self, tokens: Tensor) -> Tensor:
        """Greatest value of each row: a column, float64, -inf for a row of no length."""

    @abstractmethod
    def beside(self, column: Tensor) -> Tensor:
        """A column that broadcasts against tensors of tokens."""

    @abstractmethod
    def repeats(self, tokens: Tensor) -> Tensor:
        """Bool by token: whether the one before it in its row has the same value."""

    @abstractmethod
    def running(self, flags: Tensor) -> Tensor:
        """How many of its row's tokens up to this one are true, int64."""

    @abstractmethod
    def sorted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of each row in order of their value, and along the last dimension the place that each has left."""

    @abstractmethod
    def place(self, number: Tensor) -> Tensor:
        """Along the last dimension, the place of the token of this number, from 0, in its row."""


@dataclass(frozen=True)
class Padded(Rows):
    """(B, T), every row of one width."""

    shape: torch.Size

    @property
    def count(self) -> int:
        return self.shape[0]

    def tokens(self, given: Tensor) -> Tensor:
        return given

    def as_given(self, tokens: Tensor) -> Tensor:
        return tokens

    def column(self, by_row: Tensor) -> Tensor:
        return by_row[:, None]

    def sum(self, tokens: Tensor) -> Tensor:
        if tokens.dtype is torch.bool:
            return tokens.view(torch.uint8).sum(-1, keepdim=True).double()
        return tokens.sum(-1, keepdim=True, dtype=torch.float64)

    def least(self, tokens: Tensor) -> Tensor:
        if not self.shape[1]:
            return tokens.new_full((self.count, 1), torch.iinfo(tokens.dtype).max)
        return tokens.amin(-1, keepdim=True)

    def greatest(self, tokens: Tensor) -> Tensor:
        if not self.shape[1]:
            return tokens.new_full((self.count, 1), float("-inf"), dtype=torch.float64)
        return tokens.amax(-1, keepdim=True).double()

    def beside(self, column: Tensor) -> Tensor:
        return column

    def repeats(self, tokens: Tensor) -> Tensor:
        same = torch.zeros_like(tokens, dtype=torch.bool)
        same[:, 1:] = tokens[:, 1:] == tokens[:, :-1]
        return same

    def running(self, flags: Tensor) -> Tensor:
        return flags.cumsum(-1)

    def sorted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ordered, order = tokens.sort(dim=-1, stable=True)
        return ordered, order

    def place(self, number: Tensor) -> Tensor:
        return number


@dataclass(frozen=True)
class Packed(Rows):
    """(N,), the rows end to end.

    Attributes:
        offsets: (B + 1,) integers, where each row begins, and N.
        length: N.
        like: what a caller gave, nested.
    """

    offsets: Tensor
    length: int
    like: Tensor
    _known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def row(self) -> Tensor:
        """(N,) int64, the row of each token."""
        # Not a cached property: its lock cannot be compiled.
        if "row" not in self._known:
            self._known["row"] = torch.repeat_interleave(self.offsets.diff(), output_size=self.length)
        return self._known["row"]

    def tokens(self, given: Tensor) -> Tensor:
        return given.values()

    def as_given(self, tokens: Tensor) -> Tensor:
        # Made from offsets alone it would not know its longest row, and torch would pad it to the number of all tokens.
        nested = torch.empty_like(self.like, dtype=tokens.dtype, requires_grad=False)
        nested.values().copy_(tokens)
        return nested

    def column(self, by_row: Tensor) -> Tensor:
        return by_row

    def sum(self, tokens: Tensor) -> Tensor:
        # By segment, since atomic additions would differ in their last digits from run to run on a GPU.
        return torch.segment_reduce(tokens.double(), "sum", offsets=self.offsets, initial=0, unsafe=True)

    def least(self, tokens: Tensor) -> Tensor:
        least = tokens.new_full((self.count,), torch.iinfo(tokens.dtype).max)
        return least.scatter_reduce_(0, self.row, tokens, "amin")

    def greatest(self, tokens: Tensor) -> Tensor:
        greatest = tokens.new_full((self.count,), float("-inf"), dtype=torch.float64)
        return greatest.scatter_reduce_(0, self.row, tokens.double(), "amax")

    def beside(self, column: Tensor) -> Tensor:
        return column.index_select(0, self.row)

    def repeats(self, tokens: Tensor) -> Tensor:
        same = torch.zeros_like(tokens, dtype=torch.bool)
        same[1:] = (tokens[1:] == tokens[:-1]) & (self.row[1:] == self.row[:-1])
        return same

    def running(self, flags: Tensor) -> Tensor:
        total = flags.cumsum(0)
        before = torch.cat((total.new_zeros(1), total)).index_select(0, self.offsets[:-1])
        return total - self.beside(before)

    def sorted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        by_value = tokens.argsort(stable=True)
        order = by_value[self.row[by_value].argsort(stable=True)]
        return tokens[order], order

    def place(self, number: Tensor) -> Tensor:
        return number + self.beside(self.offsets[:-1])


def rows_of(**given: Tensor) -> Rows:
    """How the tokens of these tensors lie, each (B, T), or nested by row with layout ``torch.jagged``.

    Raises:
        ValueError: layouts or shapes that differ, or rows of different lengths.
    """
    packed = [name for name, tensor in given.items() if tensor.is_nested]
    if not packed:
        shape = next(iter(given.values())).shape
        # Compared without a hash, which would fix the sizes of a compiled graph.
        if len(shape) != 2 or any(tensor.shape != shape for tensor in given.values()):
            shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
            raise ValueError(f"expected tensors of one shape (B, T), got {shapes}")
        return Padded(shape)
    if len(packed) != len(given):
        padded = [name for name in given if name not in packed]
        raise ValueError(f"{', '.join(packed)} are nested, {', '.join(padded)} are not. {_ONE_LAYOUT}")
    for name, tensor in given.items():
        if tensor.layout is not torch.jagged or tensor.dim() != 2 or _is_narrowed(tensor):
            raise ValueError(
                f"{name} is nested with layout {tensor.layout} and {tensor.dim()} dimensions: expected rows of tokens "
                f"end to end. Pass torch.nested.nested_tensor(list of (T,) tensors, layout=torch.jagged), "
                f"or {name}.contiguous() of a narrowed one."
            )
    return _packed_rows(given)


def row_counts(tokens: Tensor) -> Tensor:
    """(B,) float64, how many of each row's tokens are true: bool or 0/1, (B, T) or nested by row."""
    rows = rows_of(tokens=tokens)
    return rows.sum(rows.tokens(tokens)).flatten()


def for_each_token(by_row: Tensor, like: Tensor) -> Tensor:
    """The value of each token's row, (B,) spread over the rows of ``like``, (B, T) or nested by row."""
    rows = rows_of(like=like)
    tokens = rows.tokens(like)
    return rows.as_given(rows.beside(rows.column(by_row.to(tokens.device))).expand(tokens.shape))


def _packed_rows(given: dict[str, Tensor]) -> Packed:
    first, *others = given
    offsets, length = _offsets(given[first]), given[first].values().shape[0]
    for name in others:
        theirs, here = _offsets(given[name]), given[name].values().shape[0]
        if theirs is offsets and here == length:
            continue
        alike = theirs.shape == offsets.shape and here == length
        if alike and (offsets.device.type != "cpu" or torch.compiler.is_compiling()):
            # Found out on the device: to ask for the answer would be to wait for it.
            torch._assert_async((theirs == offsets).all(), f"rows of {name} and {first} differ in length")
        elif not alike or not torch.equal(theirs, offsets):
            raise ValueError(
                f"rows of {name} ({len(theirs) - 1} of {here} tokens in all) are not as long as those of {first} "
                f"({len(offsets) - 1} of {length}): expected nested tensors with equal offsets."
            )
    return Packed(offsets, length, given[first])


def _offsets(nested: Any) -> Tensor:
    offsets: Tensor = nested.offsets()
    return offsets


def _is_narrowed(nested: Any) -> bool:
    """Whether some of its values belong to no row."""
    return nested.lengths() is not None
