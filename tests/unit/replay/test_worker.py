"""Workers whose engine replays; what the engine does is in tests/integration/test_replaying_engine.py."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.offpolicy.replay.batch_routes import ReplaySettings

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")


def test_an_actor_flags_its_batches_and_its_engine_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipe.offpolicy.replay import fsdp_engine as module

    done: list[Any] = []
    monkeypatch.setattr(module, "install_in_engine", lambda *args: done.append(args))
    actor = SimpleNamespace(enable_routing_replay=False, actor=SimpleNamespace(engine="engine"))
    pickle.loads(pickle.dumps(partial(module.install_in_worker, settings=ReplaySettings("R3", 2))))(actor)
    assert actor.enable_routing_replay is True
    assert done == [("engine", "R3", 2)]
