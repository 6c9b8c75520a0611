"""Workers whose engine replays supports; what the engine does is in tests/integration/test_support_engine.py."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.verl("==0.9.1")
pytest.importorskip("verl")


def test_the_actors_engine_replays_and_that_of_the_reference_does_not() -> None:
    from recipe.offpolicy.support.fsdp_engine import SupportEngine, install_support

    def build_engine() -> SimpleNamespace:
        return SimpleNamespace(prepare_model_outputs="verl's", forward_backward_batch="verl's")

    worker = SimpleNamespace(actor=SimpleNamespace(engine=build_engine()), ref=SimpleNamespace(engine=build_engine()))
    pickle.loads(pickle.dumps(partial(install_support, unknown="full")))(worker)
    support = worker.actor.engine.prepare_model_outputs.__self__
    assert isinstance(support, SupportEngine)
    assert support.unknown == "full"
    assert worker.ref.engine == build_engine()
