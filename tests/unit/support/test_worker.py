"""Workers whose engine replays; what the engine does is in tests/integration/test_support_engine.py."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from recipe.offpolicy.support.support_settings import SupportSettings

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")

SETTINGS = SupportSettings(8, "full")


class Actor:
    """Of verl's."""

    actor_worker_cls: Any = None


def test_an_actor_trains_by_a_worker_that_replays_and_travels_by_value() -> None:
    from recipe.offpolicy.support.worker import SupportTrainingWorker, build_supporting

    for worker in (
        build_supporting(Actor, SETTINGS),
        cloudpickle.loads(cloudpickle.dumps(build_supporting(Actor, SETTINGS))),
    ):
        assert issubclass(worker.actor_worker_cls, SupportTrainingWorker)
        assert worker.actor_worker_cls.settings == SETTINGS
    assert Actor.actor_worker_cls is None
