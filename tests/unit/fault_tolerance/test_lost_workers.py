"""Handles of the trainer's Ray actors, and their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from recipe.offpolicy.fault_tolerance.lost_workers import end_workers, list_actor_handles, summarize_death

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


def test_a_death_is_told_by_what_was_raised_and_else_by_all_of_it() -> None:
    # As Ray words an error of a constructor.
    raised = """The actor died because of an error raised in its creation task, ray::Worker.__init__() (repr=<Worker>)
  File "/somewhere/reward.py", line 29, in <module>
    raise ValueError("text")
AttributeError: 'NoneType' object has no attribute '__dict__'

The above exception was the direct cause of the following exception:

ray::Worker.__init__() (repr=<Worker>)
  File "/somewhere/import_utils.py", line 191, in load_module
RuntimeError: Error loading module"""
    error = RayActorError(error_msg=raised)
    assert (
        summarize_death(error)
        == "AttributeError: 'NoneType' object has no attribute '__dict__' -> RuntimeError: Error loading module"
    )
    assert summarize_death(RayActorError(error_msg="The actor\n\tdied: OOM.")) == "The actor died: OOM."
