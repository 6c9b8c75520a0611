"""Splits a micro-batch into parts with rows of similar length, so that memory scales with tokens instead of padding.

verl's loss has the denominators of the whole mini-batch, so the losses of the parts add up to the loss of the
micro-batch; ``preflight.base_loss_probe`` checks this for the configured loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu

from .padding import Layout

AT_ONCE = 1 << 18
"""Most padded tokens of a part, unless one row is longer; a smaller micro-batch is not split."""
FEW = 1 << 15
"""Padded tokens up to which rows stay in one part, however different their lengths."""
_UNREAD = ("input_ids", "position_ids", "multi_modal_inputs")
"""Columns of the model's input, unused by a loss that gets the responses separately."""

MicroBatchPart = tuple[Mapping[str, Any], TensorDict]
"""The model's output and verl's micro-batch of the same rows."""


def split_micro_batch(model_output: Mapping[str, Any], data: TensorDict) -> list[MicroBatchPart]:
    """Split a micro-batch as the engine hands it to its loss; the parts' outputs carry the gradient of the whole.

    A micro-batch with few tokens, or with padded log-probs, is returned unchanged. The lengths of others are read from
    the device.
    """
    if not model_output["log_probs"].is_nested or "prompts" not in data.keys():
        return [(model_output, data)]
    layout = Layout.of(data)
    if len(data) * layout.width <= AT_ONCE:
        return [(model_output, data)]
    # Padded columns keep their width, for any rows.
    lengths = [layout.width] * len(data) if layout.tokens is None else layout.responses.tolist()
    return [take_rows(model_output, data, rows) for rows in group_rows(lengths)]


def group_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows so that a group padded to its longest row has at most ``AT_ONCE`` tokens, usually less than half of
    them padding; a longer row is its own group.

    Example:
        >>> group_rows([200, 40_000, 256])
        [[1], [0, 2]]
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        padded = (len(groups[-1]) + 1) * longest if groups else 0
        if not groups or padded > AT_ONCE or (padded > FEW and longest > 2 * lengths[row]):
            groups.append([])
            longest = lengths[row]
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def take_rows(model_output: Mapping[str, Any], data: TensorDict, rows: Sequence[int]) -> MicroBatchPart:
    """Take rows of a micro-batch, in this order; differentiable."""
    by_row = {
        key: value for key, value in model_output.items() if isinstance(value, Tensor) and len(value) == len(data)
    }
    index = torch.tensor(rows)
    taken = tu.index_select_tensor_dict(TensorDict(by_row, batch_size=len(data)), index)
    left = [key for key in data.keys() if key not in _UNREAD] if "prompts" in data.keys() else list(data.keys())
    part = tu.index_select_tensor_dict(data.select(*left), index)
    return {**model_output, **{key: taken[key] for key in by_row}}, part
