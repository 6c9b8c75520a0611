"""verl's own asynchronous trainer and replay buffer with a staleness limit, without rollouts, workers or Ray.

TransferQueue is a dictionary, and the schedule decides when a prompt is finished.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

ROWS = 2
"""Rows of a group."""
USUAL, LONG = 5, 20
"""Number of response tokens of usual rows, and of stragglers."""
BLOCKED = 4
"""Number of polls after which every prompt that is being sampled has finished, because the trainer waits for it."""


class Queue:
    """TransferQueue: tags and fields by key, for the partition that is trained."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.fields: dict[str, Any] = {}

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            self.tags.pop(key, None)

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: Any, fields: Any = None) -> None:
        for i, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            self.tags[key] = self.tags.get(key, {}) | tag
            if fields is not None:
                self.fields[key] = fields[i]

    def kv_batch_get(self, keys: list[str], partition_id: str) -> TensorDict:
        return torch.stack([self.fields[key] for key in keys])


class Run:
    """One run of verl's ``separate_async`` trainer with a staleness limit.

    Args:
        delay: takes a prompt's number, and how often it was sampled again; steps that it takes to sample.
        staleness: keys of ``offpolicy.staleness``.

    Attributes:
        trained: (step, uid, age) of each group that was trained.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        batch: int = 4,
        updates: int = 2,
        delay: Callable[[int, int], int] = lambda number, times: 0,
        **staleness: Any,
    ) -> None:
        from recipe.offpolicy.batch.declared_keys import read_shipped_defaults
        from recipe.offpolicy.staleness import buffer
        from recipe.offpolicy.staleness.staleness_limit import StalenessLimit
        from recipe.offpolicy.trainer.corrected_run import choose_v1
        from recipe.offpolicy.trainer.corrected_v1 import CorrectedV1
        from verl.trainer.ppo.v1 import replay_buffer, trainer_base
        from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

        self.queue = Queue()
        for module in (replay_buffer, trainer_base, buffer):
            monkeypatch.setattr(module, "tq", self.queue)
        self.batch, self.updates, self.delay = batch, updates, delay
        self.trained: list[tuple[int, str, int]] = []
        self._number, self._finish, self._polls = 0, dict[str, int](), 0
        self.trainer: Any = object.__new__(PPOTrainerSeparateAsync)
        self.trainer.config = OmegaConf.create(
            {
                "data": {"train_batch_size": batch, "gen_batch_size": 1},
                "trainer": {
                    "use_v1": True,
                    "v1": {"trainer_mode": "separate_async", "separate_async": {}, "sampler": {"sampler_kwargs": {}}},
                },
                "algorithm": {},
                "offpolicy": {"staleness": read_shipped_defaults("staleness") | staleness},
            }
        )
        self.corrected: Any = CorrectedV1(self.trainer, choose_v1)
        (self.limit,) = (each for each in self.corrected.add_ons._all if isinstance(each, StalenessLimit))
        self.trainer.trainer_mode = "separate_async"
        self.trainer.global_steps = 1
        self.trainer._fetch_one_gen_batch = self._fetch
        self.trainer.agent_loop_manager = SimpleNamespace(generate_sequences=self._generate)
        self.trainer.replay_buffer = self.buffer = self.trainer._build_replay_buffer()
        self.buffer.poll_interval = 0
        monkeypatch.setattr(replay_buffer.time, "sleep", lambda seconds: self._poll())

    @property
    def step(self) -> int:
        step: int = self.trainer.global_steps
        return step

    def train(self, steps: int) -> None:
        """Repeat what verl's ``step`` does with prompts and rows."""
        for _ in range(steps):
            self.trainer._add_batch_to_generate()
            self._settle()
            for _ in range(self.updates):
                self._polls = 0
                meta, _ = self.buffer.sample(self.step, "train", self.batch // self.updates)
                for key, tag in zip(meta.keys, meta.tags, strict=True):
                    if key.endswith("_0_0"):
                        age = self.step - 1 - tag["min_global_steps"]
                        self.trained.append((self.step, key.split("_")[0], age))
                self.queue.kv_clear("train", meta.keys)
            self.trainer.global_steps += 1

    def ages(self) -> list[int]:
        return [age for _, _, age in self.trained]

    def fail(self, uid: str) -> None:
        """Make a prompt fail while it is being sampled."""
        self.queue.tags[uid]["status"] = "failure"

    def _fetch(self) -> TensorDict:
        self._number += 1
        fields = {"uid": NonTensorStack(f"u{self._number - 1}"), "index": torch.tensor([self._number - 1])}
        return TensorDict(fields, batch_size=1)

    def _generate(self, batch: TensorDict) -> None:
        for uid, number in zip(batch["uid"], batch["index"].tolist(), strict=True):
            times = int(uid.partition(".")[2] or 0)
            self._finish[uid] = self.step + self.delay(number, times)
            self.queue.tags[uid]["status"] = "running"

    def _poll(self) -> None:
        self._polls += 1
        assert self._polls < 3 * BLOCKED, "the trainer waits for ever"
        self._settle(blocked=self._polls >= BLOCKED)

    def _settle(self, blocked: bool = False) -> None:
        for uid, tag in list(self.queue.tags.items()):
            if tag.get("status") != "running" or not (blocked or self._finish[uid] <= self.step):
                continue
            tag["status"] = "finished"
            number = int(uid.partition(".")[0].removeprefix("u"))
            length = LONG if self.delay(number, 0) else USUAL
            for session in range(ROWS):
                self.queue.tags[f"{uid}_{session}_0"] = {
                    "status": "success",
                    "global_steps": tag["global_steps"],
                    "min_global_steps": tag["global_steps"] - 1,
                    "max_global_steps": self.newest(uid),
                    "response_len": length,
                }

    def newest(self, uid: str) -> int:
        """Return the version that the server reports for the last token of a row that finishes now."""
        return self.step - 1
