"""An external module for verl that breaks a V1 run on purpose: faults to be caught.

    OFFPOLICY_FAULT=name:step    one of FAULTS, at this step

In the trainer's process it kills or stops processes of its own run, found by asking their Ray actors for the pid; in
rollout workers it spoils log-probs or loses values of prefixes; in the actor's workers it hangs in the midst of a
checkpoint or sends other weights; in rollout servers it keeps the prefix cache.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from verl_patches.deferred import after_import

NAME, _, _STEP = os.environ.get("OFFPOLICY_FAULT", "none:0").partition(":")
STEP = int(_STEP)
FOR_EVER = 3600.0
_told: list[str] = []
_calls: list[None] = []


def _say(text: str = NAME) -> None:
    """Print once what happens, and when."""
    if not _told:
        _told.append(text)
        print(f"fault: {text} at {time.time():.1f}", flush=True)


def _is_due() -> bool:
    """Count a call, and return whether it is the STEP-th or a later call."""
    _calls.append(None)
    return len(_calls) >= STEP


def _wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method; the replacement gets the original as its first argument. Start-up checks see the original
    signature.
    """
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await replacement(original, *args, **kwargs)

    is_coroutine = inspect.iscoroutinefunction(replacement)
    setattr(owner, name, functools.wraps(original)(awaited if is_coroutine else called))


# In the trainer ---------------------------------------------------------------------------------------------


def _own_pid(actor: Any) -> int:
    return os.getpid()


def find_pid(actor: Any) -> int:
    """Find the process of a Ray actor."""
    import ray

    return int(ray.get(actor.__ray_call__.remote(_own_pid)))


def _find_server(trainer: Any) -> int:
    return find_pid(trainer.llm_server_manager.server_handles[0])


def _find_engines(trainer: Any) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(_find_server(trainer)).children(recursive=True)]


Find = Callable[[Any], list[int]]
SIGNALS: dict[str, tuple[str, bool, signal.Signals, Find]] = {
    "kill_rollout_server": ("_step_once", True, signal.SIGKILL, lambda trainer: [_find_server(trainer)]),
    "kill_rollout_engine": ("_step_once", True, signal.SIGKILL, _find_engines),
    "kill_agent_loop": (
        "_step_once",
        True,
        signal.SIGKILL,
        lambda trainer: [find_pid(trainer.agent_loop_manager.agent_loop_workers[0])],
    ),
    "kill_actor_worker": (
        "_update_actor",
        True,
        signal.SIGKILL,
        lambda trainer: [find_pid(trainer.actor_rollout_wg.workers[0])],
    ),
    "stop_rollout_engine": ("_update_actor", False, signal.SIGSTOP, _find_engines),
}
"""Name -> method of the trainer, whether the signal comes before the method, the signal, and its receiver."""


def _signal_processes() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    method, before, number, find = SIGNALS[NAME]

    def strike(trainer: Any) -> None:
        if trainer.global_steps == STEP:
            pids = find(trainer)
            _say(f"{number.name} to {pids}")
            for pid in pids:
                os.kill(pid, number)

    def act(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            strike(self)
        result = original(self, *args, **kwargs)
        if not before:
            strike(self)
        return result

    _wrap(PPOTrainer, method, act)


# In the agent loop and its client ---------------------------------------------------------------------------

_previous: list[float] = []


def _of_another_row(log_probs: list[float]) -> list[float]:
    """Return the values of the preceding rows, as far as they reach."""
    global _previous
    taken, _previous = (_previous + log_probs)[: len(log_probs)], log_probs
    return taken


SPOIL: dict[str, Callable[[list[float]], list[float] | None]] = {
    "lose_log_probs": lambda log_probs: None,
    "zero_log_probs": lambda log_probs: [0.0] * len(log_probs),
    "shift_log_probs": lambda log_probs: [log_probs[-1], *log_probs[:-1]],
    "log_probs_of_other_rows": _of_another_row,
}


def _spoil_log_probs() -> None:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    async def postprocess(original: Any, self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        if not validate and kwargs["global_steps"] >= STEP:
            _say()
            for one in output if isinstance(output, list) else [output]:
                one.response_logprobs = SPOIL[NAME](one.response_logprobs)
        await original(self, output, validate, **kwargs)

    # Ray wraps a class into an actor class; the class itself is kept in its metadata.
    _wrap(AgentLoopWorkerTQ.__ray_metadata__.modified_class, "_agent_loop_postprocess", postprocess)


def _tell_the_next_version() -> None:
    """Make a rollout server report the version after the one with which it samples."""
    from verl.workers.rollout.llm_server import LLMServerClient

    async def generate(original: Any, self: Any, request_id: str, **kwargs: Any) -> Any:
        output = await original(self, request_id, **kwargs)
        if (version := output.extra_fields.get("global_steps")) is not None and version >= STEP:
            _say()
            output.extra_fields["global_steps"] = version + 1
        return output

    _wrap(LLMServerClient, "generate", generate)


# Between trainer and engine ---------------------------------------------------------------------------------

Weights = list[tuple[str, Any]]
_first: Weights = []
_before: Weights = []

SEND: dict[str, Callable[[Weights], Weights]] = {
    "stale_weights": lambda given: _first,
    "late_weights": lambda given: list(_before),
    "late_parameters": lambda given: list(_before),
    "layer_left_out": lambda given: [(name, tensor) for name, tensor in given if "layers.1." not in name],
    "other_weights": lambda given: [(name, tensor * 1.01) for name, tensor in given],
    "nothing_sent": lambda given: [],
}
"""Values that are sent to the engine instead of the synchronised weights."""


def _choose(given: Weights) -> Weights:
    """Choose what is sent; from the STEP-th synchronisation on, other weights are sent with the new version."""
    if not _first:
        _first.extend(given)
    due = _is_due()
    chosen = SEND[NAME](given) if due else given
    _before[:] = given
    if due:
        _say()
    return [(name, tensor.clone()) for name, tensor in chosen]


async def _one_by_one(weights: Weights) -> AsyncIterator[tuple[str, Any]]:
    for pair in weights:
        yield pair


def _send_other_weights() -> None:
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    async def update_weights(original: Any, self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        apart = hasattr(weights, "__aiter__")  # from a trainer in processes of its own
        pairs = [pair async for pair in weights] if apart else weights
        if chosen := _choose([(name, tensor.clone()) for name, tensor in pairs]):
            await original(self, _one_by_one(chosen) if apart else iter(chosen), *args, **kwargs)

    _wrap(ServerAdapter, "update_weights", update_weights)


def _give_other_weights() -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    def get_per_tensor_param(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, config = original(self, *args, **kwargs)
        return iter(_choose([(name, tensor.clone()) for name, tensor in weights])), config

    _wrap(FSDPEngine, "get_per_tensor_param", get_per_tensor_param)


def _fail_to_load() -> None:
    """Raise in the STEP-th update of an engine's weights, counted over buckets."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    def update_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_due() and not _told:
            _say()
            raise KeyError("layers.7.unknown")
        return original(self, *args, **kwargs)

    _wrap(vLLMColocateWorkerExtension, "_update_weights", update_weights)


def _keep_cache() -> None:
    """Keep the prefix cache across synchronisations, from the STEP-th on."""
    from vllm.v1.engine.async_llm import AsyncLLM

    async def reset_prefix_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_due():
            return await original(self, *args, **kwargs)
        _say()
        return True

    _wrap(AsyncLLM, "reset_prefix_cache", reset_prefix_cache)


# Elsewhere --------------------------------------------------------------------------------------------------


def _lose_values() -> None:
    """Drop the prefix values with which the rows were scored."""
    from recipe.offpolicy.extensions.process_reward.manager import ScoringWorker

    async def score(original: Any, *given: Any) -> None:
        _say()

    _wrap(ScoringWorker, "_score", score)


def _hang_in_checkpoint() -> None:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    def save_checkpoint(original: Any, self: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        if f"global_step_{STEP}" not in local_path:
            return original(self, local_path, *args, **kwargs)
        _say(f"hangs in the midst of {local_path}")
        os.makedirs(local_path, exist_ok=True)
        # As torch.save leaves it when it is interrupted.
        with open(f"{local_path}/model_world_size_1_rank_0.pt", "wb") as sink:
            sink.write(b"PK\x03\x04 half a file")
        time.sleep(FOR_EVER)

    _wrap(FSDPCheckpointManager, "save_checkpoint", save_checkpoint)


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    **dict.fromkeys(SIGNALS, ("verl.trainer.ppo.v1.trainer_base", _signal_processes)),
    **dict.fromkeys(SPOIL, ("verl.trainer.ppo.v1.agent_loop_tq", _spoil_log_probs)),
    **dict.fromkeys(SEND, ("verl.workers.rollout.vllm_rollout.vllm_rollout", _send_other_weights)),
    "version_ahead": ("verl.workers.rollout.llm_server", _tell_the_next_version),
    "late_parameters": ("verl.workers.engine.fsdp.transformer_impl", _give_other_weights),
    "failing_load": ("verl.workers.rollout.vllm_rollout.utils", _fail_to_load),
    "kept_cache": ("verl.workers.rollout.vllm_rollout.vllm_async_server", _keep_cache),
    "lost_values": ("recipe.offpolicy.extensions.process_reward.manager", _lose_values),
    "hang_in_checkpoint": ("verl.utils.checkpoint.fsdp_checkpoint_manager", _hang_in_checkpoint),
}
"""Name -> the module that the fault waits for, and what the fault then does."""

if NAME != "none":
    after_import(*FAULTS[NAME])
