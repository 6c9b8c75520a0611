"""``BatchView`` of verl's V0 trainer, whose columns are padded tensors of a DataProto; it adds no padding rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl import DataProto

from ..correction import RolloutStage, Statistic
from ..extensions.batch_view import check_columns
from .own_forward import Pair

_SCORES = ("token_level_scores", "rm_scores")
"""Columns that exist from the advantages on, and from the rollout on."""
_REWARDS = "token_level_rewards"
"""Input of the estimator: the scores, minus the KL penalty if KL is in the reward."""


class DataProtoBatch:
    """One batch, see ``extensions.batch_view.BatchView`` and ``extensions.add_ons.TrainerBatch``.

    Args:
        batch: verl's batch.
        step: the trainer's step.
        sent: called with the columns that go to the workers.
        forward: computes log-probs of (prompt, response) pairs by the trainer's own forward pass, outside the batch.
        decide: runs the rollout stage of the correction in force on the batch.
    """

    def __init__(
        self,
        batch: DataProto,
        step: int,
        sent: Callable[[Mapping[str, Tensor]], None] = lambda columns: None,
        forward: Callable[[DataProto, Sequence[Pair]], list[list[float]]] | None = None,
        decide: Callable[[DataProto], RolloutStage] | None = None,
    ):
        self.batch = batch
        self.step = step
        self.silent: Tensor | None = None
        self._sent, self._forward, self._decide = sent, forward, decide
        self._groups: list[str] | None = None
        self._stage: RolloutStage | None = None

    @property
    def is_padding(self) -> Sequence[bool]:
        return [False] * len(self.batch)

    @property
    def uids(self) -> list[str]:
        return self._groups or [str(uid) for uid in self.batch.non_tensor_batch["uid"]]

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

    def compute_log_probs(self, rows: Sequence[Pair]) -> list[list[float]]:
        assert self._forward is not None, "this view was built without a trainer's forward pass"
        return self._forward(self.batch, rows)

    def weigh(self) -> tuple[Tensor, Mapping[str, Statistic]]:
        assert self._decide is not None, "this view was built without a correction"
        if self._stage is None:
            self._stage = self._decide(self.batch)
        return self._stage.weight * self._stage.keep, self._stage.statistics

    def regroup(self, groups: Sequence[str], silent: Sequence[bool]) -> None:
        """Replace the groups that extensions see, and mark the rows whose advantage is 0."""
        self._groups, self.silent = list(groups), torch.tensor(silent)

    @property
    def scores(self) -> Tensor:
        scores: Tensor = self.batch.batch[next(name for name in _SCORES if name in self.batch.batch.keys())]
        return scores

    @property
    def advantages(self) -> Tensor:
        advantages: Tensor = self.batch.batch["advantages"]
        return advantages

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
    """``PromptView`` of the DataProto that the V0 trainer is about to sample from."""

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
