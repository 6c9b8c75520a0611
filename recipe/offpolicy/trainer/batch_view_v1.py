"""``BatchView`` of verl's V1 trainer, whose columns are stored in TransferQueue, nested by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..batch.plan import Groups
from ..batch.queue_columns import put_columns, read_columns, zero_rows
from ..extensions.batch_view import check_columns
from .batch_view import ESTIMATES, HeldBatch

SCORES = "rm_scores"


class TransferQueueBatch(HeldBatch):
    """One batch in TransferQueue; see also ``extensions.add_ons.TrainerBatch``.

    Attributes:
        batch: verl's KVBatchMeta, whose metadata includes all columns put so far; verl continues with this object.
    """

    def __init__(self, batch: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(batch, *arguments, **named)
        self.is_padding: Sequence[bool] = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        self._real = [row for row, padding in enumerate(self.is_padding) if not padding]

    @property
    def uids(self) -> list[str]:
        return self._groups or [key.rsplit("_", 2)[0] for key in self.keys]

    @property
    def sessions(self) -> list[str]:
        return [key.rsplit("_", 1)[0] for key in self.keys]

    @property
    def keys(self) -> list[str]:
        return [self.batch.keys[row] for row in self._real]

    @property
    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        found = read_columns(self.batch, "prompts", "responses")
        prompts, responses = found["prompts"].unbind(), found["responses"].unbind()
        return [(prompts[row].tolist(), responses[row].tolist()) for row in self._real]

    def list_uids(self) -> list[str]:
        """List verl's uid of every row, padding included."""
        return [str(uid) for uid in read_columns(self.batch, "uid")["uid"]]

    @contextmanager
    def without_rejected(self, groups: Groups) -> Iterator[None]:
        """Let verl estimate advantages with these ``groups``, and then set the advantages of silent rows to 0."""
        uids = self.list_uids()
        self.batch = put_columns(self.batch, uid=NonTensorStack(*groups.uids))
        yield
        found = read_columns(self.batch, *ESTIMATES)
        silenced = {name: zero_rows(found[name], groups.silent) for name in ESTIMATES}
        self.batch = put_columns(self.batch, uid=NonTensorStack(*uids), **silenced)

    @property
    def scores(self) -> Tensor:
        scores: Tensor = self.rows(SCORES)[SCORES]
        return scores

    def rows(self, *names: str) -> dict[str, Any]:
        found = read_columns(self.batch, *names)
        return {name: self._of_real(found[name]) for name in names}

    def put(self, **columns: Tensor) -> None:
        check_columns(columns, len(self._real))
        whole = {name: self._whole(column) for name, column in columns.items()}
        self._sent(whole)
        self.batch = put_columns(self.batch, **whole)

    @contextmanager
    def shaped(self, rewards: Tensor) -> Iterator[None]:
        raw = read_columns(self.batch, SCORES)[SCORES]
        try:
            self.batch = put_columns(self.batch, **{SCORES: self._whole(rewards)})
            yield
        finally:
            self.batch = put_columns(self.batch, **{SCORES: raw})

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        whole = self._whole(advantages)
        self.batch = put_columns(self.batch, advantages=whole, **({"returns": whole} if returns else {}))

    @cached_property
    def _lengths(self) -> list[int]:
        """Number of response tokens of each row."""
        lengths: list[int] = read_columns(self.batch, "response_mask")["response_mask"].offsets().diff().tolist()
        return lengths

    def _of_real(self, column: Any) -> Any:
        if not isinstance(column, Tensor):
            values = list(column)
            return [values[row] for row in self._real]
        if column.is_nested:
            rows = column.unbind()
            return pad_sequence([rows[row] for row in self._real], batch_first=True)
        return column[self._real]

    def _whole(self, column: Tensor) -> Tensor:
        """Expand a column to all rows, with zeros on padding rows; a per-token column is returned nested."""
        if column.dim() == 1:
            whole = column.new_zeros(len(self.is_padding))
            whole[self._real] = column
            return whole
        rows = [column.new_zeros(length) for length in self._lengths]
        for row, values in zip(self._real, column, strict=True):
            rows[row] = values[: self._lengths[row]].clone()
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class TensorDictPrompts:
    """``PromptView`` of the TensorDict with the prompts that the V1 trainer is about to submit."""

    def __init__(self, prompts: TensorDict, step: int) -> None:
        self._prompts = prompts
        self.step = step

    @property
    def uids(self) -> list[str]:
        return [str(uid) for uid in self._prompts["uid"]]

    def rows(self, *names: str) -> dict[str, Any]:
        found = {name: self._prompts[name] for name in names}
        return {name: value if isinstance(value, Tensor) else list(value) for name, value in found.items()}

    def put(self, **columns: Any) -> None:
        for name, values in columns.items():
            self._prompts[name] = values if isinstance(values, Tensor) else NonTensorStack(*values)
