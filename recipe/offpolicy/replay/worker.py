"""Routing replay in verl's actor workers, around the engine that trains."""

from __future__ import annotations

from typing import Any

from .fsdp_engine import install_in_engine
from .replay_settings import ReplaySettings


def install_replay(worker: Any, settings: ReplaySettings) -> None:
    """Let the actor's engine replay routes, and its calls flag their batches, which those of the reference do not."""
    worker.enable_routing_replay = True
    install_in_engine(worker.actor.engine, settings.mode, settings.oldest)
