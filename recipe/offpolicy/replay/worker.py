"""Routing replay in verl's actor workers, around the training engine."""

from __future__ import annotations

from typing import Any

from .fsdp_engine import install_in_engine
from .replay_settings import ReplaySettings


def install_replay(worker: Any, settings: ReplaySettings) -> None:
    """Make the actor's engine replay routes, and flag the batches of its calls, but not of the reference's."""
    worker.enable_routing_replay = True
    install_in_engine(worker.actor.engine, settings.mode, settings.oldest)
