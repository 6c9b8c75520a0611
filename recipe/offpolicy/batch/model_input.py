"""Hash of each sequence's model input: the tokens of prompt and response, and their positions."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction.row_layout import PackedRows
from .padding import values_of
from .seals import hash_block, hash_columns

COLUMNS = ("input_ids", "position_ids")
"""Columns of the model input, nested by row, or padded and accompanied by "attention_mask"."""


@torch.no_grad()
def hash_model_input(rows: TensorDict) -> Tensor:
    """Hash each row's ``COLUMNS``, (B,) int64; the hash is the same for nested and for padded columns.

    Args:
        rows: contains ``COLUMNS``; position_ids are (B, L), or (B, K, L) for models with K position axes.
    """
    tokens, positions = (rows[name] for name in COLUMNS)
    if not tokens.is_nested:
        axes = positions if positions.dim() == 3 else positions[:, None]
        # Positions are small integers, which float32 represents exactly.
        return _combine(hash_columns(tokens, rows["attention_mask"], [*axes.float().unbind(1)]))
    ids, axes = values_of(tokens), values_of(positions)
    if axes.shape[-1] != len(ids):
        # torch nests (K, L) rows of one length along K instead of L.
        axes = axes.view(len(rows), -1, axes.shape[-1]).transpose(0, 1).flatten(1)
    layout = PackedRows(tokens.offsets(), len(ids), tokens)
    return _combine(hash_block(layout, ids, torch.ones_like(ids, dtype=torch.bool), axes.float().view(-1, len(ids))))


def _combine(hashes: Tensor) -> Tensor:
    """Combine the hashes of the position axes, (B, K), into a sum with odd factors, which wraps around."""
    return (hashes * torch.arange(1, 2 * hashes.shape[1], 2, device=hashes.device)).sum(-1)
