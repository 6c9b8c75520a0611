"""Units: the tokens of a row that share one weight or one decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence", "turn", "version"]


@dataclass(frozen=True)
class Units:
    """A partition of each row's valid tokens; U is 1 by sequence, T by token, else the most segments of a row.

    Attributes:
        valid: (B, T) bool, the tokens that belong to a unit.
        index: (B, T) int64 in [0, U), the unit of each token; None by token and by sequence.
        level: what a unit is.
    """

    valid: Tensor
    index: Tensor | None
    level: Level

    def total(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each unit: (B, T), 0 off ``valid``, to (B, U) float64."""
        if self.level == "token":
            return values.double()
        if self.index is None:
            return values.sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.zeros(self.shape, dtype=torch.float64, device=values.device)
        return sums.scatter_add_(1, self.index, values.double())

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each unit: (B, T), 0 off ``valid``, to (B, U) float64; 0 for no token."""
        return self.total(values) / self.tokens.clamp(min=1)

    def greatest(self, values: Tensor) -> Tensor:
        """Greatest value of each unit: (B, T) to (B, U) float64; -inf for no token."""
        chosen = torch.where(self.valid, values.double(), -math.inf)
        if self.level == "token":
            return chosen
        index = self.index if self.index is not None else torch.zeros_like(self.valid, dtype=torch.int64)
        least = torch.full(self.shape, -math.inf, dtype=torch.float64, device=values.device)
        return least.scatter_reduce_(1, index, chosen, "amax")

    def spread(self, values: Tensor) -> Tensor:
        """The value of each token's unit: (B, U) to (B, T). What it says off ``valid`` has no meaning."""
        if self.index is None:
            return values.expand(self.valid.shape)
        return values.gather(1, self.index)

    @cached_property
    def tokens(self) -> Tensor:
        """(B, U) float64, valid tokens of each unit."""
        return self.total(self.valid)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(B, U)."""
        rows, width = self.valid.shape
        if self.level == "token":
            return rows, width
        return rows, 1 if self.index is None else int(self.index.max()) + 1 if self.index.numel() else 1


def units_of(level: Level, valid: Tensor, ids: Tensor | None) -> Units:
    """The units of one level.

    Args:
        valid: (B, T) bool.
        ids: (B, T) integers for ``turn`` and ``version``: tokens of a row with one id form a unit.
    """
    return Units(valid, _compact(ids, valid) if level in ("turn", "version") and ids is not None else None, level)


def turns(response_mask: Tensor) -> Tensor:
    """Turn of each token by the runs of the response mask, which tool outputs interrupt: (B, T) int64 from 0.

    Args:
        response_mask: (B, T) bool or 0/1.
    """
    mask = response_mask.bool()
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return (starts.cumsum(-1) - 1).clamp(min=0)


def _compact(ids: Tensor, valid: Tensor) -> Tensor:
    """Ids renumbered from 0 in each row, in the order of their size; 0 off ``valid``."""
    # A token opens a unit where its id differs from the one before it in the row sorted by id.
    ordered, order = torch.where(valid, ids, torch.iinfo(ids.dtype).max).sort(dim=-1, stable=True)
    opens = torch.zeros_like(ordered)
    opens[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).to(ordered.dtype)
    compact = torch.zeros_like(ids, dtype=torch.int64).scatter_(1, order, opens.cumsum(-1).to(torch.int64))
    return torch.where(valid, compact, 0)
