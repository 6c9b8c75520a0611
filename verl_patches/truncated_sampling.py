"""Contracts on what the support of truncated sampling is replayed by.

A server class of ours asks vLLM for the ids that each token could have been, a client of ours notes them by row, and
two methods of the FSDP engine's instance are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .contract import Contract, wrap
from .engine_loss import seam
from .releases import specifiers

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_WORKERS = "verl.workers.engine_workers"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_V0 = "verl.trainer.ppo.ray_trainer"
_seam = partial(seam, releases=specifiers(lambda release: release.truncated_support), option="correction.support")

_GET_CLIENT = _seam(
    "client of the V0 trainer",
    "verl.workers.rollout.llm_server:LLMServerManager.get_client",
    "(self, client_cls=None, **kwargs)",
)

SEAMS = (
    _seam(
        "prepare_model_outputs",
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs",
        "(self, output, output_args, micro_batch, logits_processor_func)",
        keys=("log_probs", "temperature_rmpad", "temperature"),
        names=("logprobs_from_logits", "nested_tensor_from_jagged"),
    ),
    _seam(
        "forward_step around the outputs",
        f"{_ENGINE}:FSDPEngineWithLMHead.forward_step",
        "(self, micro_batch, loss_function, forward_only)",
        names=("prepare_model_outputs",),
    ),
    _seam(
        "forward_backward_batch of the support",
        f"{_ENGINE}:FSDPEngine.forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        names=("forward_step", "backward", "postprocess_batch_func"),
    ),
    _seam("init_model of the support", f"{_WORKERS}:ActorRolloutRefWorker.init_model", None, names=("actor", "reset")),
    _seam(
        "servers of the V0 trainer",
        f"{_V0}:RayPPOTrainer.init_workers",
        "(self)",
        names=("LLMServerManager", "get_client"),
    ),
    _GET_CLIENT,
    _seam(
        "attempts of a request",
        "verl.workers.rollout.llm_server:LLMServerClient.generate",
        None,
        keys=("global_steps",),
        names=("extra_fields", "generate"),
    ),
    _seam(
        "register of replicas",
        "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
        "(name, loader)",
        names=("_registry",),
    ),
)
"""What ``recipe.offpolicy.support`` wraps, overrides or relies on."""


_notes: list[Callable[[Any], Any]] = []


def note_clients(note: Callable[[Any], Any]) -> None:
    """Let ``note(client)`` replace each client of rollout servers that this process makes; the last one given."""
    _notes[:] = [note]
    wrap(_GET_CLIENT, lambda original, *args, **kwargs: _notes[-1](original(*args, **kwargs)))


def build_server_seams() -> tuple[Contract, ...]:
    """Build the contracts on verl's vLLM server, which ``support.support_server`` overrides.

    They are in no table: the module imports where vLLM is installed and verl knows its release, as in the server's own
    process, which checks them.
    """
    return (
        _seam("server_class", f"{_SERVER}:vLLMReplica.launch_servers", "(self)", names=("server_class",)),
        _seam(
            "generate of a vLLM server",
            f"{_SERVER}:vLLMHttpServer.generate",
            None,
            keys=("logprobs",),
            names=("SamplingParams", "extract_prompt_logprobs"),
        ),
        _seam(
            "extract_prompt_logprobs",
            f"{_SERVER}:extract_prompt_logprobs",
            "(output, num_prompt_logprobs, result_dict)",
            names=("prompt_logprobs",),
        ),
        _seam(
            "_preprocess_engine_kwargs",
            f"{_SERVER}:vLLMHttpServer._preprocess_engine_kwargs",
            "(self, engine_kwargs)",
        ),
    )
