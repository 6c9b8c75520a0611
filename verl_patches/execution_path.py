"""Detection of the trainer and worker of verl that the configured run goes through.

| verl | trainer | worker |
|---|---|---|
| 0.7.1 | ``RayPPOTrainer`` (V0) | legacy actor, or engine with ``trainer.use_legacy_worker_impl=disable`` |
| 0.8.0 | V0 | engine |
| 0.9.0, 0.9.1 | V1, or V0 with ``trainer.use_v1=false`` | engine |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from .contract import demand_release, installed_release
from .releases import Release, attributes_of

STRATEGY = "actor_rollout_ref.actor.strategy"
"""The key that decides about the engine."""
LEGACY = "trainer.use_legacy_worker_impl"
USE_V1 = "trainer.use_v1"
MODE = "trainer.v1.trainer_mode"


@dataclass(frozen=True)
class LivePath:
    """Path of a run from the rollout to the gradient.

    Attributes:
        release: of the installed verl.
        trainer: V0 is ``RayPPOTrainer`` over DataProto, V1 the trainers over TransferQueue.
        worker: what computes the loss.
        strategy: verl's ``actor.strategy``: fsdp, fsdp2, megatron, or one that is not covered.
        mode: of the V1 trainer: sync, colocate_async, separate_async; V0 has sync alone.
    """

    release: str
    trainer: Literal["v0", "v1"]
    worker: Literal["engine", "legacy"]
    strategy: str
    mode: str = "sync"

    @property
    def attributes(self) -> Release:
        """The attributes in which the release differs from others."""
        return attributes_of(self.release)

    def __str__(self) -> str:
        worker = f"{self.worker} {'actor' if self.worker == 'legacy' else 'worker'}"
        return f"verl {self.release}, {self.trainer.upper()} trainer, {worker} on {self.strategy}, mode {self.mode}"


def live_path(config: DictConfig, release: str | None = None) -> LivePath:
    """Find the path of a composed configuration; ``release`` is that of the verl that an import finds by default.

    Raises:
        PatchError: no verl is found.
    """
    release = release or installed_release("verl") or demand_release()
    row = attributes_of(release)
    # A release without legacy actors or V1 trainer does not read the key, whatever it says.
    legacy = row.legacy_actors and OmegaConf.select(config, LEGACY, default="auto") != "disable"
    actor = config.actor_rollout_ref.actor
    strategy = actor.strategy
    if row.legacy_actors and not legacy and strategy in ("fsdp", "fsdp2"):
        # Its engine takes the version of FSDP from its own section alone.
        strategy = OmegaConf.select(actor, "fsdp_config.strategy", default=strategy)
    v1 = bool(row.v1_modes and OmegaConf.select(config, USE_V1, default=False))
    return LivePath(
        release=release,
        trainer="v1" if v1 else "v0",
        worker="legacy" if legacy else "engine",
        strategy=strategy,
        mode=str(OmegaConf.select(config, MODE, default="sync")) if v1 else "sync",
    )
