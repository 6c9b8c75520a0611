"""verl's workers with routing replay around the engine that trains.

Seams in verl 0.9.1, see ``verl_patches.router_replay``: ``ActorRolloutRefWorker.actor_worker_cls``, its attribute
``enable_routing_replay``, by which its calls flag their batches, and ``TrainingWorker.reset(self)``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from verl.workers.engine_workers import TrainingWorker

from .fsdp_engine import ReplayingEngine, install_in_engine
from .replay_settings import ReplaySettings


class ReplayingTrainingWorker(TrainingWorker):
    """The actor's inner worker, see ``build_replaying``."""

    settings: ClassVar[ReplaySettings]
    replaying: ReplayingEngine | None = None

    def reset(self) -> None:
        super().reset()
        if self.replaying is None:
            self.replaying = install_in_engine(self.engine, self.settings.mode, self.settings.oldest)


class ReplayingWorker:
    """Mixin of verl's actor workers, see ``build_replaying``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_routing_replay = True


def build_replaying(worker: type, settings: ReplaySettings) -> type:
    """Build a subclass of verl's actor worker whose engine replays routes; it travels to other processes by value."""
    inner = type("ReplayingTrainingWorker", (ReplayingTrainingWorker,), {"settings": settings})
    return type(f"Replaying{worker.__name__}", (ReplayingWorker, worker), {"actor_worker_cls": inner})
