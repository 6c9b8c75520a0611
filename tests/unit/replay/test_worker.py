"""Workers whose engine replays; what the engine does is in tests/integration/test_replaying_engine.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from recipe.offpolicy.replay.replay_settings import ReplaySettings

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")

SETTINGS = ReplaySettings("R3", 2)


class Actor:
    """Of verl's: it says in its constructor that FSDP replays nothing."""

    actor_worker_cls: Any = None

    def __init__(self, role: str) -> None:
        self.role, self.enable_routing_replay = role, False


def test_an_actor_flags_its_batches_and_trains_by_a_worker_that_replays() -> None:
    from recipe.offpolicy.replay.worker import ReplayingTrainingWorker, build_replaying

    worker = build_replaying(Actor, SETTINGS)
    actor = worker("actor")
    assert (actor.role, actor.enable_routing_replay) == ("actor", True)
    assert issubclass(worker.actor_worker_cls, ReplayingTrainingWorker)
    assert worker.actor_worker_cls.settings == SETTINGS
    assert Actor("actor").enable_routing_replay is False


def test_it_travels_to_another_process_by_value() -> None:
    from recipe.offpolicy.replay.worker import build_replaying

    arrived = cloudpickle.loads(cloudpickle.dumps(build_replaying(Actor, SETTINGS)))
    assert arrived.actor_worker_cls.settings == SETTINGS


def test_replay_is_installed_once_the_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine_workers import TrainingWorker

    from recipe.offpolicy.replay import worker as module

    done: list[Any] = []
    monkeypatch.setattr(TrainingWorker, "reset", lambda self: done.append("initialised"))
    monkeypatch.setattr(module, "install_in_engine", lambda *args: done.append(args) or "replaying")
    inner: Any = object.__new__(module.build_replaying(Actor, SETTINGS).actor_worker_cls)
    inner.engine = SimpleNamespace()
    inner.reset()
    inner.reset()
    assert done == ["initialised", (inner.engine, "R3", 2), "initialised"]
