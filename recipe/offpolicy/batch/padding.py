"""Columns of verl's batches: layouts, padding, splits into rows of similar length, and TransferQueue.

verl's ``no_padding_2_padding`` slices row by row, reads the lengths from the device, and needs one torch pass per
nested column. This module uses one index table for all columns and needs no host transfer.

verl's loss uses the denominators of the whole mini-batch, so a micro-batch can be split into parts whose losses add up
to its loss. ``preflight.checks.base_loss`` checks this for the configured loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ..correction.row_layout import spread_over_tokens


@dataclass(frozen=True)
class Layout:
    """Layout of one micro-batch.

    Attributes:
        prompts, responses: (B,) int64, number of tokens of each row.
        width: T, number of tokens of the longest response, or verl's padded width.
        tokens: total number of response tokens; None if they are padded and the number is not known on the host.
    """

    prompts: Tensor
    responses: Tensor
    width: int
    tokens: int | None = None

    @classmethod
    def of(cls, data: TensorDict) -> Layout:
        """Build from "prompts" and "responses": nested, or padded with "attention_mask"."""
        prompts, responses = data["prompts"], data["responses"]
        if responses.is_nested:
            # torch stores this length with a nested tensor that was built from rows, as verl's micro-batches are. For
            # any other nested tensor, torch reads the length from the device.
            width = int(responses._get_max_seqlen())
            return cls(prompts.offsets().diff(), responses.offsets().diff(), width, len(values_of(responses)))
        mask, cut = data["attention_mask"], prompts.shape[1]
        return cls(mask[:, :cut].sum(-1), mask[:, cut:].sum(-1), responses.shape[1])

    @cached_property
    def absent(self) -> Tensor:
        """(B, T) bool, True on padding."""
        return self._positions >= self.responses[:, None]

    def column(self, values: Tensor) -> Tensor:
        """Pad concatenated responses to (B, T), zeros on padding."""
        return self._gathered(values, self._of_responses)

    def responses_of(self, values: Tensor) -> Tensor:
        """Select the responses, (B, T) or (B, T, K), from an output over prompts and responses; differentiable.

        Padding is 0.

        Args:
            values: (total tokens,) or (total tokens, K); each position contains the value of the next token.
        """
        return self._gathered(values, self._of_output)

    def place(self, values: Tensor, total: int) -> Tensor:
        """Inverse of ``responses_of``: place (B, T) values in a (total tokens,) tensor, with zeros elsewhere.

        This function synchronises with the device.
        """
        there = ~self.absent
        placed = values.new_zeros(total)
        placed[self._of_output[there]] = values[there]
        return placed

    def input_of(self, values: Tensor) -> Tensor:
        """Select the responses, (B, T), from the model's input over prompts and responses: (total tokens,).

        The result is meaningless on padding.
        """
        return values[1:][self._of_output]

    @cached_property
    def _positions(self) -> Tensor:
        return torch.arange(self.width, device=self.responses.device)

    @cached_property
    def _of_responses(self) -> Tensor:
        return self._places(self.responses.cumsum(0) - self.responses)

    @cached_property
    def _of_output(self) -> Tensor:
        ends = (self.prompts + self.responses).cumsum(0)
        return self._places(ends - self.responses - 1)

    def _places(self, starts: Tensor) -> Tensor:
        return (starts[:, None] + self._positions).masked_fill_(self.absent, 0)

    def _gathered(self, values: Tensor, places: Tensor) -> Tensor:
        absent = self.absent if values.dim() == 1 else self.absent[..., None]
        return values[places].masked_fill(absent, 0)


def values_of(column: Any) -> Tensor:
    """Return the concatenated rows of a nested column, outside autograd; a padded column is returned unchanged.

    ``values()`` creates a view that autograd tracks, which takes as long as ten operations on a small batch.
    """
    values: Tensor = column._values if column.is_nested else column
    return values.detach()


def flatten(tensor: Tensor) -> Tensor:
    """Return the (total tokens,) values of a nested or flat tensor."""
    return tensor.values() if tensor.is_nested else tensor


def nest_like(values: Tensor, like: Any) -> Tensor:
    """Nest concatenated rows with the layout of ``like``; return them unchanged if ``like`` is not nested."""
    return torch.nested.nested_tensor_from_jagged(values, like.offsets()) if like.is_nested else values


def with_tensors(data: TensorDict, **tensors: Tensor | None) -> TensorDict:
    """Make a shallow copy of the micro-batch and add padded (B, T) tensors; None removes the key."""
    removed = {key for key, tensor in tensors.items() if tensor is None}
    # ``copy`` would also copy each row's objects, which takes about 0.6 ms per row of verl's batches.
    changed = data.select(*(key for key in data.keys() if key not in removed))
    for key, tensor in tensors.items():
        if tensor is not None:
            changed[key] = tensor
    return changed


def pad_column(column: Tensor, layout: Layout, key: str) -> Tensor:
    """Pad a column of the responses to (B, T) with zeros; a padded column is returned unchanged.

    Raises:
        ValueError: a nested column has more or fewer tokens than the responses.
    """
    if not column.is_nested:
        return column
    values = values_of(column)
    if layout.tokens is not None and len(values) != layout.tokens:
        raise ValueError(
            f"{key} in the micro-batch has {len(values)} tokens, but the responses have {layout.tokens} tokens: code "
            "between rollout and loss truncated or padded one of them."
        )
    return layout.column(values)


AT_ONCE = 1 << 18
"""Maximum number of padded tokens in a part, unless a single row is longer; a smaller micro-batch is not split."""
FEW = 1 << 15
"""Number of padded tokens up to which rows stay in one part, even if their lengths differ widely."""
_UNREAD = ("multi_modal_inputs",)
"""Columns of the model's input that the loss does not use."""

MicroBatchPart = tuple[Mapping[str, Any], TensorDict]
"""The model's output, and verl's micro-batch, for the same rows."""


def split_micro_batch(model_output: Mapping[str, Any], data: TensorDict) -> list[MicroBatchPart]:
    """Split the micro-batch that the engine passes to its loss; gradients flow from the parts back to its output.

    A micro-batch with few tokens is not split. For all other micro-batches, row lengths are read from the device.

    Args:
        model_output: contains nested log-probs, or, from a legacy actor, (B, T) log-probs of the responses only.
    """
    of_engine = model_output["log_probs"].is_nested
    if of_engine is not ("prompts" in data.keys()):
        return [(model_output, data)]
    layout = Layout.of(data) if of_engine else None
    width = model_output["log_probs"].shape[1] if layout is None else layout.width
    if len(data) * width <= AT_ONCE:
        return [(model_output, data)]
    counts = data["attention_mask"][:, -width:].sum(-1) if layout is None else layout.responses
    lengths: list[int] = counts.tolist()
    parts = []
    for rows in group_rows(lengths):
        longest = max(max(lengths[row] for row in rows), 1)
        some = data if data["responses"].is_nested else _cut_padding(data, width, longest)
        output, part = take_rows(model_output, some, rows)
        if not of_engine:
            output = {key: value[:, :longest] for key, value in output.items()}
        parts.append((output, part))
    return parts


def _cut_padding(data: TensorDict, width: int, longest: int) -> TensorDict:
    """Cut padded columns, of responses (B, width, ...) or of whole sequences, to responses of ``longest`` tokens."""
    whole = data["attention_mask"].shape[1]
    kept = {width: longest, whole: whole - width + longest}
    cut = data.select(*data.keys())
    for name, column in data.items():
        padded = isinstance(column, Tensor) and not column.is_nested and column.dim() > 1
        # The engine has summed the whole loss_mask, including padding, so the loss must compare the whole mask.
        if not padded or name in ("prompts", "loss_mask"):
            continue
        axis = column.dim() - 1 if name == "position_ids" else 1
        if column.shape[axis] in kept:
            cut[name] = column.narrow(axis, 0, kept[column.shape[axis]])
    return cut


def group_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Group rows so that a padded group has at most ``AT_ONCE`` tokens; a longer row is its own group.

    Usually, less than half of a group's tokens are padding.

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
    from verl.utils import tensordict_utils as tu  # what-if imports this module without verl

    by_row = {
        key: value for key, value in model_output.items() if isinstance(value, Tensor) and len(value) == len(data)
    }
    index = torch.tensor(rows)
    taken = tu.index_select_tensor_dict(TensorDict(by_row, batch_size=len(data)), index)
    left = [key for key in data.keys() if key not in _UNREAD]
    part = tu.index_select_tensor_dict(data.select(*left), index)
    return {**model_output, **{key: taken[key] for key in by_row}}, part


FORWARD = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0}
"""Keys in a batch's ``extra_info`` with which verl describes a forward pass to its workers."""


def read_columns(batch: Any, *names: str) -> TensorDict:
    """Read columns of the batch that a KVBatchMeta describes, for all rows including padding."""
    import transfer_queue as tq  # other releases lack it

    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def put_columns(batch: Any, **columns: Any) -> Any:
    """Put columns into the batch and return its new metadata."""
    import transfer_queue as tq

    fields = TensorDict(columns, batch_size=len(batch.keys))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def zero_rows(nested: Tensor, silent: Sequence[bool]) -> Tensor:
    """Copy a column that is nested by row, with zeros in the rows that ``silent`` flags."""
    loud = spread_over_tokens(~torch.tensor(silent, dtype=torch.bool), nested)
    zeroed = torch.empty_like(nested)
    # Multiplication by 0 would not work, because it turns a negative number into -0, whose bits differ from those of 0.
    zeroed.values().copy_(nested.values().where(loud.values(), nested.values().new_zeros(())))
    return zeroed
