"""Handles of the trainer's Ray actors, and their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from recipe.offpolicy.fault_tolerance.lost_workers import end_workers, list_actor_handles

WORKER, SERVER = (SimpleNamespace(name=name, __ray_ready__=None) for name in ("worker", "server"))


def trainer() -> Any:
    return SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(workers=[WORKER]),
        critic_wg=None,
        llm_server_manager=SimpleNamespace(server_handles=[SERVER, "no actor"]),
    )


def test_handles_are_listed_by_the_attribute_that_holds_them() -> None:
    assert list(list_actor_handles(trainer())) == [("actor_rollout_wg", WORKER), ("llm_server_manager", SERVER)]
    assert list(list_actor_handles(SimpleNamespace())) == []


def test_all_are_ended_also_after_one_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    def kill(handle: Any) -> None:
        ended.append(handle)
        if handle is WORKER:
            raise RuntimeError("it has died already")

    monkeypatch.setattr(ray, "kill", kill)
    end_workers(trainer())
    assert ended == [WORKER, SERVER]
