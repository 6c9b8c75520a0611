"""An external module for verl that breaks a V1 run on purpose: faults to be caught.

    OFFPOLICY_FAULT=name:step    one of FAULTS, at this step

In the trainer's process it kills or stops processes of its own run, found by asking their Ray actors for the pid; in
rollout workers it spoils log-probs or loses values of prefixes; in the actor's workers it hangs in the midst of a
checkpoint or sends other weights; in rollout servers it keeps the prefix cache.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from verl_patches.deferred import after_import

NAME, _, _STEP = os.environ.get("OFFPOLICY_FAULT", "none:0").partition(":")
STEP = int(_STEP)
FOR_EVER = 3600.0


def pid_of(actor: Any) -> int:
    """The process of a Ray actor."""
    import ray

    return int(ray.get(actor.__ray_call__.remote(_own_pid)))


def _own_pid(actor: Any) -> int:
    return os.getpid()


def _say(text: str) -> None:
    print(f"fault: {text} at {time.time():.1f}", flush=True)


def _end(trainer: Any, what: str, pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        _say(f"{number.name} to {what} {pid}")
        os.kill(pid, number)


def _server(trainer: Any) -> int:
    return pid_of(trainer.llm_server_manager.server_handles[0])


def _engines(trainer: Any) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(_server(trainer)).children(recursive=True)]


def kill_actor_worker(trainer: Any) -> None:
    _end(trainer, "the actor's worker", [pid_of(trainer.actor_rollout_wg.workers[0])], signal.SIGKILL)


def kill_rollout_server(trainer: Any) -> None:
    _end(trainer, "the rollout server", [_server(trainer)], signal.SIGKILL)


def kill_rollout_engine(trainer: Any) -> None:
    _end(trainer, "the rollout engine", _engines(trainer), signal.SIGKILL)


def kill_agent_loop(trainer: Any) -> None:
    workers = trainer.agent_loop_manager.agent_loop_workers
    _end(trainer, "an agent loop", [pid_of(workers[0])], signal.SIGKILL)


def stop_rollout_engine(trainer: Any) -> None:
    _end(trainer, "the rollout engine", _engines(trainer), signal.SIGSTOP)


BEFORE_SAMPLING: dict[str, Callable[[Any], None]] = {
    "kill_rollout_server": kill_rollout_server,
    "kill_rollout_engine": kill_rollout_engine,
    "kill_agent_loop": kill_agent_loop,
}
BEFORE_UPDATE: dict[str, Callable[[Any], None]] = {"kill_actor_worker": kill_actor_worker}
AFTER_UPDATE: dict[str, Callable[[Any], None]] = {"stop_rollout_engine": stop_rollout_engine}


def _in_trainer() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    step_once, update_actor = PPOTrainer._step_once, PPOTrainer._update_actor

    def at(faults: dict[str, Callable[[Any], None]], trainer: Any) -> None:
        if trainer.global_steps == STEP and NAME in faults:
            faults[NAME](trainer)

    # Start-up checks compare signatures, and look through wraps.
    @functools.wraps(step_once)
    def _step_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        at(BEFORE_SAMPLING, self)
        return step_once(self, *args, **kwargs)

    @functools.wraps(update_actor)
    def _update_actor(self: Any, *args: Any, **kwargs: Any) -> Any:
        at(BEFORE_UPDATE, self)
        result = update_actor(self, *args, **kwargs)
        at(AFTER_UPDATE, self)
        return result

    PPOTrainer._step_once, PPOTrainer._update_actor = _step_once, _update_actor


_previous: list[float] = []
_told: list[str] = []


def _lose(log_probs: list[float]) -> list[float] | None:
    return None


def _zeros(log_probs: list[float]) -> list[float]:
    return [0.0] * len(log_probs)


def _shift(log_probs: list[float]) -> list[float]:
    return [log_probs[-1], *log_probs[:-1]]


def _of_another_row(log_probs: list[float]) -> list[float]:
    """Those of the rows before, as far as they reach."""
    global _previous
    taken, _previous = (_previous + log_probs)[: len(log_probs)], log_probs
    return taken


SPOIL: dict[str, Callable[[list[float]], list[float] | None]] = {
    "lose_log_probs": _lose,
    "zero_log_probs": _zeros,
    "shift_log_probs": _shift,
    "log_probs_of_other_rows": _of_another_row,
}


def _in_agent_loop() -> None:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    # Ray wraps a class into an actor class; the class itself is kept in its metadata.
    plain: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    original = plain._agent_loop_postprocess

    @functools.wraps(original)
    async def _agent_loop_postprocess(self: Any, output: Any, validate: bool, **kwargs: Any) -> None:
        if not validate and kwargs["global_steps"] >= STEP:
            if not _told:
                _told.append(NAME)
                _say(NAME)
            for one in output if isinstance(output, list) else [output]:
                one.response_logprobs = SPOIL[NAME](one.response_logprobs)
        await original(self, output, validate, **kwargs)

    plain._agent_loop_postprocess = _agent_loop_postprocess


AHEAD = "version_ahead"
"""A rollout server tells of the version after the one that it samples by."""


def _in_client() -> None:
    from verl.workers.rollout.llm_server import LLMServerClient

    original = LLMServerClient.generate

    @functools.wraps(original)
    async def generate(self: Any, request_id: str, **kwargs: Any) -> Any:
        output = await original(self, request_id, **kwargs)
        if (version := output.extra_fields.get("global_steps")) is not None and version >= STEP:
            if not _told:
                _told.append(NAME)
                _say(NAME)
            output.extra_fields["global_steps"] = version + 1
        return output

    LLMServerClient.generate = generate


_first: list[tuple[str, Any]] = []
_sent: list[int] = []
Weights = list[tuple[str, Any]]


def _stale(given: Weights, before: Weights) -> Weights:
    return _first


def _late(given: Weights, before: Weights) -> Weights:
    return before


def _without_a_layer(given: Weights, before: Weights) -> Weights:
    return [(name, tensor) for name, tensor in given if "layers.1." not in name]


def _of_another_model(given: Weights, before: Weights) -> Weights:
    return [(name, tensor * 1.01) for name, tensor in given]


UNSENT = "nothing_sent"
SEND: dict[str, Callable[[Weights, Weights], Weights]] = {
    "stale_weights": _stale,
    "late_weights": _late,
    "layer_left_out": _without_a_layer,
    "other_weights": _of_another_model,
}
"""What is sent to the engine for the weights of a synchronisation and of the one before."""


def _copy(weights: Iterable[tuple[str, Any]]) -> Weights:
    return [(name, tensor.clone()) for name, tensor in weights]


async def _one_by_one(weights: Weights) -> AsyncIterator[tuple[str, Any]]:
    for name, tensor in weights:
        yield name, tensor.clone()


def _in_rollout() -> None:
    """From the STEP-th synchronisation on the engine gets other weights, under the new ones' version."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    original = ServerAdapter.update_weights
    before: Weights = []

    @functools.wraps(original)
    async def update_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        _sent.append(1)
        apart = hasattr(weights, "__aiter__")  # from a trainer in processes of its own
        given = [(name, tensor.clone()) async for name, tensor in weights] if apart else _copy(weights)
        if not _first:
            _first.extend(given)
        if len(_sent) == STEP:
            _say(NAME)
        if len(_sent) >= STEP and NAME == UNSENT:
            return
        chosen = SEND[NAME](given, list(before)) if len(_sent) >= STEP else given
        before[:] = given
        await original(self, _one_by_one(chosen) if apart else iter(_copy(chosen)), *args, **kwargs)

    ServerAdapter.update_weights = update_weights


def _in_trainer_engine() -> None:
    """From the STEP-th synchronisation on the trainer's engine gives the weights of the one before."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    original = FSDPEngine.get_per_tensor_param
    before: Weights = []

    @functools.wraps(original)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        _sent.append(1)
        weights, config = original(self, *args, **kwargs)
        given = [(name, tensor.clone()) for name, tensor in weights]
        chosen = list(before) if len(_sent) >= STEP else given
        before[:] = given
        return iter(chosen), config

    FSDPEngine.get_per_tensor_param = get_per_tensor_param


def _in_weight_load() -> None:
    """The STEP-th update of an engine's weights raises, counted over buckets."""
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    original = vLLMColocateWorkerExtension._update_weights

    @functools.wraps(original)
    def _update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        _sent.append(1)
        if len(_sent) == STEP:
            _say(NAME)
            raise KeyError("layers.7.unknown")
        return original(self, *args, **kwargs)

    vLLMColocateWorkerExtension._update_weights = _update_weights


def _in_engine() -> None:
    """From the STEP-th synchronisation on the prefix cache is kept over it."""
    from vllm.v1.engine.async_llm import AsyncLLM

    original = AsyncLLM.reset_prefix_cache

    @functools.wraps(original)
    async def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        _sent.append(1)
        if len(_sent) < STEP:
            return await original(self, *args, **kwargs)
        if not _told:
            _told.append(NAME)
            _say(NAME)
        return True

    AsyncLLM.reset_prefix_cache = reset_prefix_cache


def _in_scoring_loop() -> None:
    """Rows come without the values that they were scored by."""
    from recipe.offpolicy.extensions.process_reward import manager

    async def score(self: Any, output: Any, truth: Any) -> None:
        if not _told:
            _told.append(NAME)
            _say(NAME)

    manager.ScoringWorker._score = score  # type: ignore[assignment]


def _in_checkpoint() -> None:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    original = FSDPCheckpointManager.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(self: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        if f"global_step_{STEP}" not in local_path:
            return original(self, local_path, *args, **kwargs)
        _say(f"hangs in the midst of {local_path}")
        os.makedirs(local_path, exist_ok=True)
        # As torch.save leaves it when it is interrupted.
        with open(f"{local_path}/model_world_size_1_rank_0.pt", "wb") as sink:
            sink.write(b"PK\x03\x04 half a file")
        time.sleep(FOR_EVER)

    FSDPCheckpointManager.save_checkpoint = save_checkpoint


if NAME in {**BEFORE_SAMPLING, **BEFORE_UPDATE, **AFTER_UPDATE}:
    after_import("verl.trainer.ppo.v1.trainer_base", _in_trainer)
elif NAME in SPOIL:
    after_import("verl.trainer.ppo.v1.agent_loop_tq", _in_agent_loop)
elif NAME == AHEAD:
    after_import("verl.workers.rollout.llm_server", _in_client)
elif NAME == UNSENT or NAME in SEND:
    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _in_rollout)
elif NAME == "late_parameters":
    after_import("verl.workers.engine.fsdp.transformer_impl", _in_trainer_engine)
elif NAME == "failing_load":
    after_import("verl.workers.rollout.vllm_rollout.utils", _in_weight_load)
elif NAME == "kept_cache":
    after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", _in_engine)
elif NAME == "lost_values":
    after_import("recipe.offpolicy.extensions.process_reward.manager", _in_scoring_loop)
elif NAME == "hang_in_checkpoint":
    after_import("verl.utils.checkpoint.fsdp_checkpoint_manager", _in_checkpoint)
elif NAME != "none":
    raise ValueError(f"OFFPOLICY_FAULT={NAME}: unknown fault")
