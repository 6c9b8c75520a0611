"""Handles of the trainer's Ray actors, and their end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from recipe.offpolicy.fault_tolerance.watchdog import (
    LostWorkerDetector,
    end_workers,
    list_actor_handles,
    summarize_death,
)

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


# As Ray words what its memory monitor did, shortened.
SHORT_OF_MEMORY = """4 worker(s) were killed due to the node running low on memory. Memory was 22.49GB of 23.54GB
OOM kill reason: Memory usage 24064483328B exceeded threshold of 24012677120B
RayError: not of the constructor
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
18716\t14.16\tpython greedy.py --all
20508\t1.79\tVLLM::Worker
"""


def test_a_death_for_want_of_memory_names_the_largest_process() -> None:
    assert summarize_death(OutOfMemoryError(SHORT_OF_MEMORY)) == (
        "4 worker(s) were killed due to the node running low on memory. Memory was 22.49GB of 23.54GB; "
        "the largest process has 14.16 GB: python greedy.py --all"
    )


class Handle:
    """A handle of an actor, whose pending answer is its name."""

    def __init__(self, name: str) -> None:
        self.__ray_ready__ = None
        self.__ray_call__ = SimpleNamespace(remote=lambda *_: name)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutOfMemoryError(SHORT_OF_MEMORY), "a worker of actor_rollout_wg has died: 4 worker(s) were killed"),
        (RayActorError(error_msg="gone"), "a worker of actor_rollout_wg has died: gone"),
        (ActorUnavailableError("away", b"0" * 16), None),
    ],
    ids=["memory", "death", "broken connection"],
)
def test_a_dead_worker_is_told_whatever_ended_it(
    monkeypatch: pytest.MonkeyPatch, error: RayError, said: str | None
) -> None:
    """An actor that the memory monitor ended is dead like others; a broken connection may come back."""
    holder = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(workers=[Handle("dead")]),
        reward_loop_manager=SimpleNamespace(reward_loop_workers=[Handle("busy")]),
    )

    def get(answer: str) -> None:
        assert answer == "dead"
        raise error

    monkeypatch.setattr(ray, "wait", lambda waiting, **_: ([each for each in waiting if each == "dead"], []))
    monkeypatch.setattr(ray, "get", get)
    found = LostWorkerDetector(holder)()
    assert found == said if said is None else found is not None and found.startswith(said)


@pytest.mark.parametrize("failure", [None, "rollout server 0 could not run update_weights_from_ipc: RuntimeError: no"])
def test_a_worker_that_lives_tells_its_failure(monkeypatch: pytest.MonkeyPatch, failure: str | None) -> None:
    holder = SimpleNamespace(llm_server_manager=SimpleNamespace(server_handles=[Handle("alive")]))
    monkeypatch.setattr(ray, "wait", lambda waiting, **_: (waiting, []))
    monkeypatch.setattr(ray, "get", lambda answer: failure)
    assert LostWorkerDetector(holder)() == (failure and f"a worker of llm_server_manager has failed: {failure}")
