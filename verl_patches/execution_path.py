"""Finds out which trainer and worker of verl a configured run uses.

| verl | trainer | worker |
|---|---|---|
| 0.7.1 | ``RayPPOTrainer`` (V0) | legacy actor, or engine with ``trainer.use_legacy_worker_impl=disable`` |
| 0.8.0 | V0 | engine |
| 0.9.0, 0.9.1 | V1, or V0 with ``trainer.use_v1=false`` | engine |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from .contract import demand_release, installed_release
from .releases import Release, attributes_of

STRATEGY = "actor_rollout_ref.actor.strategy"
"""Key that selects the training engine, such as fsdp2 or megatron."""
LEGACY = "trainer.use_legacy_worker_impl"
USE_V1 = "trainer.use_v1"
MODE = "trainer.v1.trainer_mode"
FULLY_ASYNC, ONE_STEP_OFF = "fully_async", "one_step_off"
"""Programs of verl whose V0 trainer updates during rollouts: fully_async_policy and one_step_off_policy."""


@dataclass(frozen=True)
class LivePath:
    """The path of a run from the rollout to the gradient.

    Attributes:
        release: installed release of verl.
        trainer: V0 is ``RayPPOTrainer``, which uses DataProto; V1 stands for the trainers that use TransferQueue.
        worker: the worker that computes the loss.
        strategy: verl's ``actor.strategy``: fsdp, fsdp2, megatron, or an unsupported one.
        mode: sync; V1 also has colocate_async and separate_async, V0 also has fully_async and one_step_off.
    """

    release: str
    trainer: Literal["v0", "v1"]
    worker: Literal["engine", "legacy"]
    strategy: str
    mode: str = "sync"

    @property
    def attributes(self) -> Release:
        """The attributes of this release, see ``Release``."""
        return attributes_of(self.release)

    @property
    def asynchronous(self) -> bool:
        """True if rollouts continue while the trainer updates."""
        return self.mode != "sync"

    def __str__(self) -> str:
        worker = f"{self.worker} {'actor' if self.worker == 'legacy' else 'worker'}"
        return f"verl {self.release}, {self.trainer.upper()} trainer, {worker} on {self.strategy}, mode {self.mode}"


def live_path(config: DictConfig, release: str | None = None) -> LivePath:
    """Find the path of a composed configuration; by default, ``release`` is the one that an import of verl would find.

    Raises:
        PatchError: verl is not installed.
    """
    release = release or installed_release("verl") or demand_release()
    row = attributes_of(release)
    # Releases without legacy actors or without a V1 trainer ignore this key.
    legacy = row.legacy_actors and OmegaConf.select(config, LEGACY, default="auto") != "disable"
    actor = config.actor_rollout_ref.actor
    strategy = actor.strategy
    if row.legacy_actors and not legacy and strategy in ("fsdp", "fsdp2"):
        # The engine reads the FSDP version only from its own section of the config.
        strategy = OmegaConf.select(actor, "fsdp_config.strategy", default=strategy)
    program = find_program_mode(config)
    v1 = bool(row.v1_modes and OmegaConf.select(config, USE_V1, default=False)) and program is None
    return LivePath(
        release=release,
        trainer="v1" if v1 else "v0",
        worker="legacy" if legacy else "engine",
        strategy=strategy,
        mode=str(OmegaConf.select(config, MODE, default="sync")) if v1 else program or "sync",
    )


def find_program_mode(config: DictConfig) -> str | None:
    """Identify the program by sections that only its own configuration has; None for main_ppo and similar programs."""
    if OmegaConf.select(config, "async_training") is not None:
        return FULLY_ASYNC
    return ONE_STEP_OFF if OmegaConf.select(config, "rollout.nnodes") is not None else None


def count_prompts(config: DictConfig) -> Any:
    """Return the configured number of prompts per update."""
    if find_program_mode(config) != FULLY_ASYNC:
        return OmegaConf.select(config, "data.train_batch_size")
    batches = OmegaConf.select(config, "async_training.require_batches", default=1)
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * batches


def describe_mode(config: DictConfig) -> tuple[str, str]:
    """Return the key that selects the mode and its value; for programs without such a key, return their section."""
    if (program := find_program_mode(config)) is not None:
        return ("async_training" if program == FULLY_ASYNC else "rollout"), program
    return MODE, str(OmegaConf.select(config, MODE, default="sync"))
