"""Workers whose Megatron engine is watched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")


class Actor:
    actor_worker_cls: Any = None


def test_the_engine_is_watched_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine_workers import TrainingWorker

    from recipe.offpolicy.replay import megatron_worker

    done: list[Any] = []
    monkeypatch.setattr(TrainingWorker, "reset", lambda self: done.append("initialised"))
    monkeypatch.setattr(megatron_worker, "watch_engine", lambda *args: done.append(args) or "watched")
    worker: Any = object.__new__(megatron_worker.build_watched(Actor, "R2").actor_worker_cls)  # type: ignore[attr-defined]
    worker.engine = SimpleNamespace()
    worker.reset()
    worker.reset()
    assert done == ["initialised", (worker.engine, "R2"), "initialised"]


def test_it_travels_to_another_process_by_value() -> None:
    from recipe.offpolicy.replay.megatron_worker import build_watched

    arrived = cloudpickle.loads(cloudpickle.dumps(build_watched(Actor, "R3")))
    assert arrived.actor_worker_cls.mode == "R3"
