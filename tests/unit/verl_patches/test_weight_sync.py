from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_patches.rollout_seams import build_weight_receivers, listen


@pytest.mark.parametrize("awaited", [False, True])
def test_a_listener_is_told_after_each_synchronisation(awaited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.checkpoint_engine.base import CheckpointEngineManager

    told: list[Any] = []
    manager: Any = CheckpointEngineManager.__new__(CheckpointEngineManager)
    manager.backend = "naive"
    monkeypatch.setattr("ray.get", lambda asked: told.append(asked))
    workers = type("Group", (), {"update_weights": lambda self, **kwargs: "weights"})()
    manager.actor_wg = manager.trainer = workers
    listen(lambda heard: told.append(heard))

    async def send() -> Any:
        return await manager.update_weights(3)

    result = asyncio.run(send()) if awaited else manager.update_weights(3)
    assert told == ["weights", manager]
    assert not result


def test_seams_of_vllm_hold() -> None:
    pytest.importorskip("vllm")
    for seam in build_weight_receivers():
        seam.check()
