"""Recorded rows as padded blocks of similar length, so that padding costs little and a block fits the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...recording import Rows

SIZE = 2**16
"""Places of a block, padding included; a longer row is a block by itself."""
_COLUMNS = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages", "weight")
_SHORTEST = 0.8  # of the longest row of a block


@dataclass(frozen=True)
class Block:
    """B rows of at most W tokens; padding holds zeros (False), turn -1.

    Attributes:
        rows: (B,) int64, which rows of the step these are.
        place: (B, W) bool, whether a token was recorded there.
        mask, rollout_log_prob, old_log_prob, log_prob, advantages, weight: (B, W), as recorded.
        rejected_by, turn: (B, W) int32 with the recorded bits, and int16.
        version: (B, W) int32 of the weights that sampled the token; -1 where it is not known.
        staleness: (B, W) int64, its age, see ``Rows.token_staleness``; -1 where it is not known.
    """

    rows: NDArray[np.int64]
    place: Tensor
    mask: Tensor
    rollout_log_prob: Tensor
    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    weight: Tensor
    rejected_by: Tensor
    turn: Tensor
    version: Tensor
    staleness: Tensor


def iterate_blocks(rows: Rows, size: int = SIZE) -> Iterator[Block]:
    """Yield blocks that hold every row once, the longest first."""
    lengths = np.diff(rows.offsets)
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order]
    start = 0
    while start < len(order):
        widest = max(int(ordered[start]), 1)
        # Rows come in descending length: the first that is too short for this block opens the next.
        stop = int(np.searchsorted(-ordered, -_SHORTEST * widest, side="right"))
        stop = min(max(stop, start + 1), start + max(size // widest, 1))
        yield pad_rows(rows, order[start:stop])
        start = stop


def concatenate_rows(rows: Rows) -> Block:
    """Concatenate all tokens into one long row without padding, for statistics that ignore rows."""
    columns = {name: getattr(rows, name) for name in _COLUMNS}
    return Block(
        rows=np.zeros(1, dtype=np.int64),
        place=torch.ones(1, rows.tokens, dtype=torch.bool),
        mask=torch.from_numpy(rows.response_mask)[None],
        rejected_by=torch.from_numpy(rows.rejected_by.view(np.int32))[None],
        turn=torch.from_numpy(rows.turn)[None],
        version=torch.from_numpy(rows.version)[None],
        staleness=torch.from_numpy(rows.token_staleness)[None],
        **{name: torch.from_numpy(values)[None] for name, values in columns.items()},
    )


def pad_rows(rows: Rows, chosen: NDArray[np.int64]) -> Block:
    """Pad the rows of these numbers to the longest of them."""
    lengths = np.diff(rows.offsets)[chosen]
    column = np.arange(max(int(lengths.max(initial=0)), 1))
    place = column[None, :] < lengths[:, None]
    index = torch.from_numpy(np.where(place, rows.offsets[:-1][chosen][:, None] + column, 0))
    there = torch.from_numpy(place)

    def padded(values: NDArray[np.generic], empty: int = 0) -> Tensor:
        if not len(values):
            return torch.full(index.shape, empty, dtype=torch.from_numpy(values).dtype)
        return torch.from_numpy(values)[index].masked_fill_(~there, empty)

    version = padded(rows.version, -1)
    step, oldest = (torch.from_numpy(column[chosen])[:, None] for column in (rows.step, rows.oldest_version))
    sampled_by = torch.where(version < 0, oldest, version)
    return Block(
        rows=chosen,
        place=there,
        mask=padded(rows.response_mask),
        rejected_by=padded(rows.rejected_by.view(np.int32)),  # torch has no bit operations on uint32
        turn=padded(rows.turn, -1),
        version=version,
        staleness=torch.where(sampled_by < 0, -1, (step - 1 - sampled_by).clamp(min=0)),
        **{name: padded(getattr(rows, name)) for name in _COLUMNS},
    )
