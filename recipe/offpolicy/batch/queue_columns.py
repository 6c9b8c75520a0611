"""Columns of a batch of verl's V1 trainer, stored in TransferQueue and nested by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

from ..correction.row_layout import spread_over_tokens

FORWARD = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
"""Keys in a batch's ``extra_info`` by which verl describes a forward pass to its workers."""


def read_columns(batch: Any, *names: str) -> TensorDict:
    """Read columns of the batch that a KVBatchMeta describes, for all rows including padding."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def put_columns(batch: Any, **columns: Any) -> Any:
    """Put columns into the batch and return its new metadata."""
    fields = TensorDict(columns, batch_size=len(batch.keys))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def zero_rows(nested: Tensor, silent: Sequence[bool]) -> Tensor:
    """Copy a column that is nested by row, with zeros in the rows that ``silent`` flags."""
    loud = spread_over_tokens(~torch.tensor(silent, dtype=torch.bool), nested)
    zeroed = torch.empty_like(nested)
    # Multiplication would not work, because a negative number times 0 is -0, and -0 and 0 differ in their bits.
    zeroed.values().copy_(nested.values().where(loud.values(), nested.values().new_zeros(())))
    return zeroed
