"""Batch columns that verl's legacy actors do not select."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl import DataProto

from .handover import HANDOVER, PREFIX, LegacyHandover

ROLLOUT_LOG_PROBS = "rollout_log_probs"


class Carried(DataProto):
    """Batch whose ``select`` always keeps mu and this package's columns."""

    def select(
        self,
        batch_keys: Any = None,
        non_tensor_batch_keys: Any = None,
        meta_info_keys: Any = None,
        deepcopy: bool = False,
    ) -> DataProto:
        if batch_keys is not None:
            ours = [key for key in self.batch.keys() if key.startswith(PREFIX) or key == ROLLOUT_LOG_PROBS]
            batch_keys = [*batch_keys, *(key for key in ours if key not in batch_keys)]
        return super().select(batch_keys, non_tensor_batch_keys, meta_info_keys, deepcopy)


def handover_of(data: DataProto) -> LegacyHandover | None:
    """Return the trainer's handover of this batch, or None.

    Raises:
        KeyError: mu is needed but missing in the batch.
    """
    handover: LegacyHandover | None = data.meta_info.get(HANDOVER)
    if handover is None:
        return None
    if handover.reads_rollout_log_probs and ROLLOUT_LOG_PROBS not in data.batch.keys():
        raise KeyError(
            f"{ROLLOUT_LOG_PROBS} is not in the batch that reached the actor, which holds "
            f"{', '.join(sorted(data.batch.keys()))}: set actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    return handover


def carried(data: DataProto, **columns: Tensor) -> Carried:
    """Return a shallow copy of the batch with further columns, without the handover."""
    batch = data.batch.copy()
    for key, column in columns.items():
        batch[key] = column
    meta_info = {key: value for key, value in data.meta_info.items() if key != HANDOVER}
    return Carried(batch=batch, non_tensor_batch=dict(data.non_tensor_batch), meta_info=meta_info)
