"""How a batch's tokens lie in rows: padded to one width, or one after another in a jagged nested tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Tokens as a tensor whose last dimension runs along the row: (B, T) padded, or (N,) packed.

    Attributes:
        count: B.
        width: T of padded rows, None of packed ones.
        offsets: (B + 1,) int64, first token of each packed row and N; None of padded ones.
    """

    count: int
    width: int | None
    offsets: Tensor | None

    @classmethod
    def of(cls, **tensors: Tensor) -> Rows:
        """Of tensors that lie alike.

        Raises:
            ValueError: some are nested and others are not, their rows differ, or a layout that is not jagged.
        """
        if not any(tensor.is_nested for tensor in tensors.values()):
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            first = next(iter(shapes.values()))
            if len(first) != 2 or any(shape != first for shape in shapes.values()):
                raise ValueError(f"expected tensors (B, T) of one shape, got {_listed(shapes)}")
            return cls(first[0], first[1], None)
        plain = [name for name, tensor in tensors.items() if not tensor.is_nested]
        if plain:
            raise ValueError(
                f"{', '.join(plain)} padded beside nested tensors: give all of them nested, or all padded "
                "by torch.nested.to_padded_tensor(tensor, 0)"
            )
        offsets: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found = _offsets(tensor)
            if found is None:
                raise ValueError(
                    f"{name} is nested, but not rows of tokens one after another: make it by "
                    "torch.nested.as_nested_tensor(list_of_rows, layout=torch.jagged)"
                )
            offsets[name] = found
        first_name, first_offsets = next(iter(offsets.items()))
        for name, found in offsets.items():
            if found is not first_offsets and not torch.equal(found, first_offsets):
                raise ValueError(
                    f"rows of {name} and of {first_name} differ in number or length: give those of one batch"
                )
        return cls(len(first_offsets) - 1, None, first_offsets)

    def tokens(self, tensor: Tensor) -> Tensor:
        """(B, T) or (N,) of a tensor that lies in these rows."""
        return tensor if self.offsets is None else tensor.values()

    def tensor(self, tokens: Tensor) -> Tensor:
        """As the batch came, from tokens (B, T) or (N,), or from padded ones flattened."""
        if self.offsets is None:
            return tokens.view(self.count, self.width or 0)
        # Without them torch pads to the number of all tokens.
        shortest, longest = self.offsets.diff().aminmax() if self.count else (0, 0)
        return torch.nested.nested_tensor_from_jagged(
            tokens, self.offsets, min_seqlen=int(shortest), max_seqlen=int(longest)
        )

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First token of each row, and the one after its last, among flat tokens, (B,) each."""
        if self.offsets is None:
            starts = np.arange(self.count, dtype=np.int64) * (self.width or 0)
            return starts, starts + (self.width or 0)
        offsets = self.offsets.numpy().astype(np.int64, copy=False)
        return offsets[:-1], offsets[1:]

    def part(self, tokens: Tensor, first: int, last: int) -> Tensor:
        """Flat, those of the rows from ``first`` to before ``last``; a copy only where they do not lie together."""
        if self.offsets is None:
            return tokens[first:last].reshape(-1)
        return tokens[int(self.offsets[first]) : int(self.offsets[last])]

    def sum(self, tokens: Tensor) -> Tensor:
        """(B,) from (B, T) or (N,) float64."""
        if self.offsets is None:
            return tokens.sum(-1)
        return torch.segment_reduce(tokens, "sum", offsets=self.offsets, initial=0.0)

    def greatest(self, tokens: Tensor) -> Tensor:
        """(B,) from (B, T) or (N,) float64; -inf of a row without a token."""
        if self.offsets is None:
            return tokens.amax(-1) if self.width else tokens.new_full((self.count,), -math.inf)
        return torch.segment_reduce(tokens, "max", offsets=self.offsets, initial=-math.inf)

    def spread(self, rows: Tensor) -> Tensor:
        """(B, 1) or (N,), what each row has, (B,), given to its tokens."""
        return rows[:, None] if self.offsets is None else rows.repeat_interleave(self.offsets.diff())


def _offsets(nested: Any) -> Tensor | None:
    """None where rows are not 1-dim or do not follow each other."""
    if nested.layout != torch.jagged or nested.dim() != 2 or nested.lengths() is not None:
        return None
    offsets: Tensor = nested.offsets()
    return offsets


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
