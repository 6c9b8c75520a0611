"""Contracts on the functions behind support replay of truncated sampling.

A server class of this package requests from vLLM the ids that could have been sampled at each position, a client of
this package records them per row, and two methods of the FSDP engine's instance are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from . import vllm_server
from .contract import Contract, wrap
from .engine_loss import Seams
from .releases import specifiers

_of = partial(Seams, releases=specifiers(lambda release: release.truncated_support), option="correction.support")
_engine = _of("verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead")
_SERVERS = "verl.workers.rollout.llm_server"
_GET_CLIENT = _of(f"{_SERVERS}:LLMServerManager")(
    "get_client", "(self, client_cls=None, **kwargs)", name="client of the V0 trainer"
)

SEAMS = (
    _engine(
        "prepare_model_outputs",
        "(self, output, output_args, micro_batch, logits_processor_func)",
        keys=("log_probs", "temperature_rmpad", "temperature"),
        names=("logprobs_from_logits", "nested_tensor_from_jagged"),
    ),
    _engine(
        "forward_step",
        "(self, micro_batch, loss_function, forward_only)",
        name="forward_step around the outputs",
        names=("prepare_model_outputs",),
    ),
    _of("verl.workers.engine.fsdp.transformer_impl:FSDPEngine")(
        "forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        name="forward_backward_batch of the support",
        names=("forward_step", "backward", "postprocess_batch_func"),
    ),
    _of("verl.workers.engine_workers:ActorRolloutRefWorker")(
        "init_model", name="init_model of the support", names=("actor", "reset")
    ),
    _of("verl.trainer.ppo.ray_trainer:RayPPOTrainer")(
        "init_workers", "(self)", name="servers of the V0 trainer", names=("LLMServerManager", "get_client")
    ),
    _GET_CLIENT,
    _of(f"{_SERVERS}:LLMServerClient")(
        "generate", name="attempts of a request", keys=("global_steps",), names=("extra_fields", "generate")
    ),
    _of("verl.workers.rollout.replica:RolloutReplicaRegistry")(
        "register", "(name, loader)", name="register of replicas", names=("_registry",)
    ),
)
"""Parts of verl that ``recipe.offpolicy.support`` wraps, overrides or relies on."""

_notes: list[Callable[[Any], Any]] = []


def note_clients(note: Callable[[Any], Any]) -> None:
    """Make ``note(client)`` replace each rollout client created in this process; the function given last is used."""
    _notes[:] = [note]
    wrap(_GET_CLIENT, lambda original, *args, **kwargs: _notes[-1](original(*args, **kwargs)))


def build_server_seams() -> tuple[Contract, ...]:
    """Build the contracts on verl's vLLM server, which ``support.support_server`` overrides."""
    server = _of(f"{vllm_server.SERVER}:vLLMHttpServer")
    own = server("_preprocess_engine_kwargs", "(self, engine_kwargs)")
    return (*vllm_server.build_seams(_of, "logprobs"), own)
