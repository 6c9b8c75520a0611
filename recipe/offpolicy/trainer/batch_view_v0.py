"""``BatchView`` of verl's V0 trainer, whose columns are padded tensors of a DataProto; it adds no padding rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl import DataProto

from ..batch.plan import Groups
from ..extensions.batch_view import check_columns
from .batch_view import ESTIMATES, HeldBatch

_SCORES = ("token_level_scores", "rm_scores")
"""The column that exists once advantages have been computed, and the column that exists after the rollout."""
_REWARDS = "token_level_rewards"
"""Input of the estimator: the scores, minus the KL penalty if the reward includes it."""


class DataProtoBatch(HeldBatch):
    """One batch of a DataProto; see also ``extensions.add_ons.TrainerBatch``."""

    batch: DataProto

    @property
    def is_padding(self) -> Sequence[bool]:
        return [False] * len(self.batch)

    @property
    def uids(self) -> list[str]:
        return self._groups or self.list_uids()

    @property
    def keys(self) -> list[str]:
        return [str(row) for row in range(len(self.batch))]

    sessions = keys  # each row is its own rollout

    @property
    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        tensors = self.batch.batch
        prompts, responses, there = tensors["prompts"], tensors["responses"], tensors["attention_mask"].bool()
        width = prompts.shape[1]
        return [
            (prompts[row][there[row, :width]].tolist(), responses[row][there[row, width:]].tolist())
            for row in range(len(prompts))
        ]

    def list_uids(self) -> list[str]:
        """List verl's uid of every row."""
        return [str(uid) for uid in self.batch.non_tensor_batch["uid"]]

    @contextmanager
    def without_rejected(self, groups: Groups) -> Iterator[None]:
        """Let verl estimate advantages with these ``groups``, and then set the advantages of silent rows to 0."""
        uids = self.batch.non_tensor_batch["uid"]
        self.batch.non_tensor_batch["uid"] = np.array(groups.uids, dtype=object)
        yield
        self.batch.non_tensor_batch["uid"] = uids
        for name in ESTIMATES:
            self.batch.batch[name] = self.batch.batch[name].masked_fill(torch.tensor(groups.silent)[:, None], 0.0)

    @property
    def scores(self) -> Tensor:
        scores: Tensor = self.batch.batch[next(name for name in _SCORES if name in self.batch.batch.keys())]
        return scores

    def rows(self, *names: str) -> dict[str, Any]:
        tensors = self.batch.batch
        found = {name: tensors[name] for name in names if name in tensors.keys()}
        return found | {name: list(self.batch.non_tensor_batch[name]) for name in names if name not in found}

    def put(self, **columns: Tensor) -> None:
        check_columns(columns, len(self.batch))
        self._sent(columns)
        for name, column in columns.items():
            self.batch.batch[name] = column

    @contextmanager
    def shaped(self, rewards: Tensor) -> Iterator[None]:
        raw, scores = self.batch.batch[_REWARDS], self.scores
        penalised = not torch.equal(raw, scores)
        self.batch.batch[_REWARDS] = raw + (rewards - scores) if penalised else rewards
        try:
            yield
        finally:
            self.batch.batch[_REWARDS] = raw

    def put_advantages(self, advantages: Tensor, *, returns: bool) -> None:
        self.batch.batch["advantages"] = advantages
        if returns:
            self.batch.batch["returns"] = advantages.clone()


class DataProtoPrompts:
    """``PromptView`` of the DataProto with the prompts for which the V0 trainer is about to sample responses."""

    def __init__(self, prompts: DataProto, step: int) -> None:
        self._prompts = prompts
        self.step = step

    @property
    def uids(self) -> list[str]:
        return [str(uid) for uid in self._prompts.non_tensor_batch["uid"]]

    def rows(self, *names: str) -> dict[str, Any]:
        batch = self._prompts
        tensors = set(names) & set(batch.batch.keys() if batch.batch is not None else ())
        return {name: batch.batch[name] if name in tensors else list(batch.non_tensor_batch[name]) for name in names}

    def put(self, **columns: Any) -> None:
        for name, values in columns.items():
            if isinstance(values, Tensor):
                self._prompts.batch[name] = values
            else:
                self._prompts.non_tensor_batch[name] = np.array(values, dtype=object)
