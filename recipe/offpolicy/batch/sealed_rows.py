"""Seals of the columns of one batch, recorded by the trainer when the columns are made; see ``seals``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .seals import build_seals, key_of


class SealedRows:
    """Seals of one batch, by the keys of its rows.

    Args:
        keys: keys of the rows.
        tokens, mask: "responses" and "response_mask" of these rows, nested or padded.
    """

    def __init__(self, keys: Sequence[str], tokens: Tensor, mask: Tensor) -> None:
        self.keys = list(keys)
        self.tokens, self._mask = tokens, mask
        self._seals: dict[str, Tensor] = {}

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Seal columns of all rows, replacing earlier seals of the same names."""
        self._seals |= build_seals(self.tokens, self._mask, columns)

    def moved_to(self, keys: Sequence[str], tokens: Tensor, mask: Tensor) -> SealedRows:
        """Return the seals of the rows ``keys``, a subset of these rows."""
        place = {key: row for row, key in enumerate(self.keys)}
        rows = torch.tensor([place[key] for key in keys])
        moved = SealedRows(keys, tokens, mask)
        moved._seals = {name: seal[rows] for name, seal in self._seals.items()}
        return moved

    @property
    def names(self) -> list[str]:
        """Names of the sealed columns."""
        return list(self._seals)

    def columns(self) -> dict[str, Tensor]:
        """Return the seals as columns that travel with the batch."""
        return {key_of(name): seal for name, seal in self._seals.items()}
