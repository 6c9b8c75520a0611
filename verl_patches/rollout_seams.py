"""Contracts on the servers, clients, agent loops and weight synchronisation of verl's rollouts, and the wrappers around
them.

verl starts this package's server classes through its registry of replicas. Their ``generate(self, prompt_ids,
sampling_params, request_id, ...)``, which overrides that of ``vLLMHttpServer``, returns the log-probs of a prompt.
verl's key ``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` selects this package's manager of agent loops.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from .contract import Contract, Seams, installed_release, wrap
from .releases import attributes_of, specifiers

_SERVERS = "verl.workers.rollout.llm_server"
_VLLM = "verl.workers.rollout.vllm_rollout"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_V1 = "verl.trainer.ppo.v1"
_LOOPS = "verl.experimental.agent_loop"

# Weight versions per token: in the V1 trainer's asynchronous modes and in fully_async_policy, a subclass of the client
# records the version of each attempt.
_RESUMING = "FullyAsyncLLMServerClient get_client"
_GENERATE = (
    "generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, video_data=None, audio_data=None, "
    "mm_processor_kwargs=None, **kwargs)"
)
_of_versions = partial(Seams, releases=specifiers(attrgetter("token_versions")))
VERSIONS = (
    # Each request is sent to one server, which reports its version together with the tokens.
    _of_versions(f"{_SERVERS}:LLMServerClient")(
        _GENERATE, name="LLMServerClient.generate", keys="global_steps", names="extra_fields remote"
    ),
    # The resume loop: each attempt calls the base class, and an aborted attempt is followed by another one.
    _of_versions(f"{_SERVERS}:FullyAsyncLLMServerClient")(
        _GENERATE,
        name="FullyAsyncLLMServerClient.generate",
        keys="aborted global_steps min_global_steps max_global_steps",
        names="super generate token_ids extend stop_reason",
    ),
    _of_versions(f"{_V1}.trainer_separate_async:PPOTrainerSeparateAsync")(
        "get_llm_client(self)", name="get_llm_client of separate_async", names=_RESUMING
    ),
    _of_versions(f"{_V1}.trainer_colocate_async:PPOTrainerColocateAsync")(
        "get_llm_client(self)", name="get_llm_client of colocate_async", names=_RESUMING
    ),
    _of_versions(f"{_V1}.trainer_base:PPOTrainer")("get_llm_client(self)"),
    _of_versions("verl.trainer.main_ppo:TaskRunnerV1.__ray_metadata__.modified_class")(
        "init_agent_loop_manager", names="get_llm_client"
    ),
    # A tool agent uses one request id for all turns, and keeps the extra fields of its first turn.
    _of_versions(f"{_LOOPS}.tool_agent_loop:ToolAgentLoop")(
        "_handle_generating_state",
        name="turns of a tool agent",
        keys="max_global_steps",
        names="request_id extra_fields update",
    ),
)
"""Parts of verl that ``recipe.offpolicy.staleness.client`` overrides or relies on."""

_FULLY_ASYNC_CLIENT = _of_versions(
    "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerManager"
)("get_client", name="get_client of fully_async", names="get_client")


def note_fully_async_clients(note: Callable[[Any], Any]) -> None:
    """Replace each client that fully_async_policy's rollouter gives to agent loops by ``note(client)``. Idempotent."""
    release = installed_release("verl")
    if release is not None and attributes_of(release).token_versions:
        wrap(_FULLY_ASYNC_CLIENT, lambda original, *args, **kwargs: note(original(*args, **kwargs)))


# Support replay of truncated sampling: a server class of this package requests from vLLM the ids that could have been
# sampled at each position, a client of this package records them per row, and two methods of the FSDP engine's instance
# are wrapped.
_of_support = partial(Seams, releases=specifiers(attrgetter("truncated_support")), option="correction.support")
_V0_CLIENT = _of_support(f"{_SERVERS}:LLMServerManager")(
    "get_client(self, client_cls=None, **kwargs)", name="client of the V0 trainer"
)
_sampled_model = _of_support(f"{_FSDP}:FSDPEngineWithLMHead")
SUPPORT = (
    _sampled_model(
        "prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func)",
        keys="log_probs temperature_rmpad temperature",
        names="logprobs_from_logits nested_tensor_from_jagged",
    ),
    _sampled_model(
        "forward_step(self, micro_batch, loss_function, forward_only)",
        name="forward_step around the outputs",
        names="prepare_model_outputs",
    ),
    _of_support(f"{_FSDP}:FSDPEngine")(
        "forward_backward_batch(self, data, loss_function, forward_only=False)",
        name="forward_backward_batch of the support",
        names="forward_step backward postprocess_batch_func",
    ),
    _of_support("verl.workers.engine_workers:ActorRolloutRefWorker")(
        "init_model", name="init_model of the support", names="actor reset"
    ),
    _of_support("verl.trainer.ppo.ray_trainer:RayPPOTrainer")(
        "init_workers(self)", name="servers of the V0 trainer", names="LLMServerManager get_client"
    ),
    _V0_CLIENT,
    _of_support(f"{_SERVERS}:LLMServerClient")(
        "generate", name="attempts of a request", keys="global_steps", names="extra_fields generate"
    ),
    _of_support("verl.workers.rollout.replica:RolloutReplicaRegistry")(
        "register(name, loader)", name="register of replicas", names="_registry"
    ),
)
"""Parts of verl that ``recipe.offpolicy.support`` wraps, overrides or relies on."""

_notes: list[Callable[[Any], Any]] = []


def note_clients(note: Callable[[Any], Any]) -> None:
    """Replace each rollout client created in this process with ``note(client)``; only the last ``note`` is used."""
    _notes[:] = [note]
    wrap(_V0_CLIENT, lambda original, *args, **kwargs: _notes[-1](original(*args, **kwargs)))


# Agent loops: sequences are scored for process rewards before verl computes their rewards. Nothing is patched.
_of_scores = partial(Seams, releases=specifiers(attrgetter("scores_prompts")), option="process_reward")
_loop_worker = _of_scores(f"{_LOOPS}.agent_loop:AgentLoopWorker")
_replicas = _of_scores("verl.workers.rollout.replica:RolloutReplicaRegistry")
_client = _of_scores(f"{_SERVERS}:LLMServerClient")
AGENT_LOOPS = (
    # Every agent loop's output passes through this method after the loop's last token.
    _loop_worker("_agent_loop_postprocess(self, output, validate, **kwargs)", names="extra_fields _compute_score"),
    _loop_worker("_run_agent_loop", keys="validate", names="llm_client _agent_loop_postprocess"),
    # Monte-Carlo checks use this method to reward rollouts.
    _loop_worker("_compute_score(self, outputs, kwargs)", names="reward_score reward_loop_worker_handles"),
    # Extra fields become columns of the batch.
    _loop_worker("_postprocess", names="extra_fields"),
    _of_scores(f"{_LOOPS}.agent_loop:AgentLoopManager")(
        "_init_agent_loop_workers(self)", names="agent_loop_workers_class"
    ),
    _replicas("register(name, loader)", name="register of replicas", names="_registry"),
    _replicas("get(name)", name="get of replicas", names="_registry"),
    # In 0.9.0 and later, both methods have additional parameters.
    _client("_acquire_server", names="acquire_server"),
    _client("_release_server", names="release_server"),
)
"""Parts of verl that ``recipe.offpolicy.extensions.process_reward.manager`` overrides or relies on."""

AGENT_LOOPS_V1 = (
    Seams(
        f"{_V1}.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__.modified_class",
        specifiers(attrgetter("v1_modes")),
        "process_reward",
    )(
        "_agent_loop_postprocess",
        name="_agent_loop_postprocess of TransferQueue",
        names="_compute_score as_dict",
    ),
)
"""Contracts on the V1 trainer's agent loops."""

_tools = Seams(f"{_LOOPS}.tool_agent_loop:ToolAgentLoop", option="turn_credit")
TURNS = (
    # output.extra_fields.update({"turn_scores": agent_data.turn_scores, "tool_rewards": agent_data.tool_rewards})
    _tools("run", name="rewards of turns", keys="turn_scores tool_rewards", names="extra_fields update"),
    # if tool_reward is not None: agent_data.tool_rewards.append(tool_reward): one entry per call, without its turn
    _tools("_handle_processing_tools_state", name="rewards of tools", names="tool_rewards append"),
)
"""Contracts on the rewards of turns, which ``recipe.offpolicy.extensions.turn_credit`` reads from ``extra_fields``."""


# The following contracts are not in a table, because their modules can be imported only where vLLM is installed in a
# release that verl supports. This is the case in the server's own process, which checks the contracts.
def build_scoring_server() -> tuple[Contract, ...]:
    """Build the contracts on verl's vLLM server, which ``process_reward.scoring_server`` overrides."""
    return _build_server(_of_scores, "global_steps")


def build_support_server() -> tuple[Contract, ...]:
    """Build the contracts on verl's vLLM server, which ``support.support_replay`` overrides."""
    own = _of_support(f"{_VLLM}.vllm_async_server:vLLMHttpServer")("_preprocess_engine_kwargs(self, engine_kwargs)")
    return (*_build_server(_of_support, "logprobs"), own)


def _build_server(of: Callable[[str], Seams], key: str) -> tuple[Contract, ...]:
    """Build the contracts of an option for which verl's ``generate`` must read ``key``."""
    server = f"{_VLLM}.vllm_async_server"
    return (
        of(f"{server}:vLLMReplica")("launch_servers(self)", name="server_class", names="server_class"),
        of(f"{server}:vLLMHttpServer")(
            "generate", name="generate of a vLLM server", keys=key, names="SamplingParams extract_prompt_logprobs"
        ),
        of(server)("extract_prompt_logprobs(output, num_prompt_logprobs, result_dict)", names="prompt_logprobs"),
    )


def build_weight_receivers() -> tuple[Contract, Contract, Contract]:
    """Build the contracts on verl's extension of vLLM's workers, and on its server."""
    worker = Seams(f"{_VLLM}.utils:vLLMColocateWorkerExtension")
    return (
        worker("_update_weights(self, weights, peft_config, base_sync_done)", names="load_weights add_lora"),
        worker(
            "update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False)",
            names="receive_weights _update_weights",
        ),
        Seams(f"{_VLLM}.vllm_async_server:vLLMHttpServer")(
            "collective_rpc(self, method, timeout=None, args=(), kwargs=None)", names="engine collective_rpc"
        ),
    )


WEIGHT_SYNC = Seams("verl.checkpoint_engine.base:CheckpointEngineManager")(
    "update_weights(self, global_steps=None)", name="update_weights of the manager", names="update_weights"
)
"""The function through which verl sends weights to its rollout servers; every run relies on it."""
_listeners: list[Callable[[Any], None]] = []


def listen(heard: Callable[[Any], None]) -> None:
    """Call ``heard(manager)`` after each weight synchronisation of this process; only the last ``heard`` is called."""
    _listeners[:] = [heard]
    wrap(WEIGHT_SYNC, _tell)


def _tell(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    # verl's auto_await returns a coroutine if its caller is a coroutine; otherwise, it runs the coroutine.
    if sys._getframe(2).f_code.co_flags & inspect.CO_COROUTINE:
        return _tell_awaited(original, manager, *args, **kwargs)
    result = original(manager, *args, **kwargs)
    for heard in _listeners:
        heard(manager)
    return result


async def _tell_awaited(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    result = await original(manager, *args, **kwargs)
    for heard in _listeners:
        heard(manager)
    return result
