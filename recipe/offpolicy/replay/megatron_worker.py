"""verl's workers with a look at the routers of the Megatron engine that trains.

Seams in verl 0.9.1, see ``verl_patches.router_replay``: ``ActorRolloutRefWorker.actor_worker_cls`` and
``TrainingWorker.reset(self)``.
"""

from __future__ import annotations

from typing import ClassVar

from verl.workers.engine_workers import TrainingWorker

from .batch_routes import Mode
from .megatron_engine import WatchedEngine, watch_engine


class WatchedTrainingWorker(TrainingWorker):
    """The actor's inner worker, see ``build_watched``."""

    mode: ClassVar[Mode]
    watched: WatchedEngine | None = None

    def reset(self) -> None:
        super().reset()
        if self.watched is None:
            self.watched = watch_engine(self.engine, self.mode)


def build_watched(worker: type, mode: Mode) -> type:
    """Build a subclass of verl's actor worker that watches its engine; it travels to other processes by value."""
    inner = type("WatchedTrainingWorker", (WatchedTrainingWorker,), {"mode": mode})
    return type(f"Watched{worker.__name__}", (worker,), {"actor_worker_cls": inner})
