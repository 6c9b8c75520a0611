"""Detection of dead Ray actors and failed weight loads in rollout servers, even if no call is waiting for them.

verl notices a dead worker only when it waits for that worker's answer. If the driver does not wait (agent loops in the
background), or if another worker waits (an agent loop for an inference server), prompts stay pending, or are requested
again forever. An engine that raises while loading weights stays alive, and the sender waits for its acknowledgement.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.exceptions import RayError

HOLDERS = (
    "actor_rollout_wg.workers",
    "critic_wg.workers",
    "ref_policy_wg.workers",
    "llm_server_manager.server_handles",
    "standalone_server_manager.server_handles",
    "async_rollout_manager.server_handles",
    "checkpoint_manager.replicas.servers",
    "async_rollout_manager.agent_loop_workers",
    "agent_loop_manager.agent_loop_workers",
    "reward_loop_manager.reward_loop_workers",
)
"""Trainer attributes that contain Ray actor handles, in verl 0.7.1 to 0.9.1; each trainer has only some of them."""
FAILURE = "_offpolicy_failure"
"""Attribute of an actor in which the actor stores its failure message."""


class LostWorkerDetector:
    """A callable that returns an error message if a Ray actor of the trainer has died or reports a failure, else None.

    Each actor has one pending call of Ray's ``__ray_call__`` that reads ``FAILURE``. On a busy actor, this call stays
    in the queue; on a dead actor, it fails at once, with the cause.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Reference to a pending answer -> the actor that will give it.
        self._waiting: dict[Any, Any] = {}

    def __call__(self) -> str | None:
        import ray
        from ray import exceptions as of_ray

        # Ray's memory monitor kills actors with an error of its own, which is not a RayActorError.
        deaths = of_ray.RayActorError, of_ray.OutOfMemoryError, of_ray.NodeDiedError, of_ray.WorkerCrashedError
        listed = {handle: holder for holder, handle in list_actor_handles(self._trainer)}
        for handle in listed.keys() - self._waiting.values():
            # getattr is a builtin, so every process has it.
            self._waiting[handle.__ray_call__.remote(getattr, FAILURE, None)] = handle
        if not self._waiting:
            return None
        answers, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        lost = []
        for answer in answers:
            handle = self._waiting.pop(answer)
            try:
                failure = ray.get(answer)
            except of_ray.ActorUnavailableError:
                continue  # Ray also raises it for a broken connection, which may recover
            except deaths as error:
                # An actor that the trainer no longer lists was ended on purpose.
                if handle in listed:
                    lost.append(f"a worker of {listed[handle]} has died: {summarize_death(error)}")
            else:
                if failure and handle in listed:
                    lost.append(f"a worker of {listed[handle]} has failed: {failure}")
        return " ".join(lost) or None


def summarize_death(error: RayError) -> str:
    """Summarize why an actor died, in one line.

    Returns:
        The exceptions of the actor's constructor, with the root cause first; for Ray's memory report, its first line
        and the largest process; otherwise Ray's whole message.
    """
    text = str(error)
    if users := re.search(r"^Top \d+ memory users:.*\n\S+\t(\S+)\t(.*)$", text, re.MULTILINE):
        return f"{text.splitlines()[0]}; the largest process has {users[1]} GB: {users[2]}"
    raised = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*$", text, re.MULTILINE)
    return " -> ".join(raised) or " ".join(text.split())


def end_workers(trainer: Any) -> None:
    """Kill the trainer's Ray actors, so that callers that wait for them receive an error at once."""
    import ray

    for _, handle in list_actor_handles(trainer):
        with contextlib.suppress(Exception):  # already dead actors
            ray.kill(handle)


def list_actor_handles(trainer: Any) -> Iterator[tuple[str, Any]]:
    """List (trainer attribute, handle) for every Ray actor that the trainer holds."""
    for path in HOLDERS:
        found = [trainer]
        for part in path.split("."):
            values = [getattr(one, part, None) for one in found]
            found = [each for value in values for each in (value if isinstance(value, Iterable) else [value])]
        yield from ((path.split(".")[0], handle) for handle in found if hasattr(handle, "__ray_ready__"))
