"""verl's workers whose engine that trains renormalises its policy over the replayed support.

Seams in verl 0.9.1, see ``verl_patches.truncated_sampling``: ``ActorRolloutRefWorker.actor_worker_cls`` and
``TrainingWorker.reset(self)``.
"""

from __future__ import annotations

from typing import ClassVar

from verl.workers.engine_workers import TrainingWorker

from .fsdp_engine import SupportEngine
from .support_settings import SupportSettings


class SupportTrainingWorker(TrainingWorker):
    """The actor's inner worker, see ``build_supporting``."""

    settings: ClassVar[SupportSettings]
    supporting: SupportEngine | None = None

    def reset(self) -> None:
        super().reset()
        if self.supporting is None:
            self.supporting = SupportEngine(self.engine, self.settings.unknown)


def build_supporting(worker: type, settings: SupportSettings) -> type:
    """Build a subclass of verl's actor worker that replays the support; it travels to other processes by value."""
    inner = type("SupportTrainingWorker", (SupportTrainingWorker,), {"settings": settings})
    return type(f"Support{worker.__name__}", (worker,), {"actor_worker_cls": inner})
