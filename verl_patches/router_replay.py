"""Contracts on the functions that routing replay wraps in verl's engines and workers; nothing is patched here.

In releases whose FSDP engine has no replay, a subclass of verl's worker sets, on the batch, the flag that verl's own
engines expect, and three methods of the engine's instance are wrapped.
"""

from __future__ import annotations

from functools import partial

from .engine_loss import Seams
from .releases import specifiers

_WORKERS = "verl.workers.engine_workers"
_of_fsdp = partial(Seams, releases=specifiers(lambda release: release.fsdp_replay), option="router_replay")
_of_megatron = partial(Seams, releases=specifiers(lambda release: release.watched_replay), option="router_replay")
_engine = _of_fsdp("verl.workers.engine.fsdp.transformer_impl:FSDPEngine")
_language_model = _of_fsdp("verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead")
_worker = _of_fsdp(f"{_WORKERS}:ActorRolloutRefWorker")

SEAMS = (
    _language_model(
        "prepare_model_inputs",
        "(self, micro_batch)",
        keys=("input_ids", "position_ids"),
        names=("to_padded_tensor", "pad_packed_inputs"),
    ),
    _language_model(
        "forward_step",
        "(self, micro_batch, loss_function, forward_only)",
        keys=("model_output",),
        names=("prepare_model_inputs", "prepare_model_outputs", "module"),
    ),
    _engine(
        "forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        names=("forward_step", "backward", "postprocess_batch_func"),
    ),
    _engine("eval_mode", "(self, **kwargs)"),
    # The flag that distinguishes an update from the forward pass of the reference policy.
    _of_fsdp(_WORKERS)("_with_routing_replay_flag", "(enabled)", keys=("enable_routing_replay",)),
    _worker(
        "__init__",
        "(self, config, role, distillation_config=None, **kwargs)",
        name="ActorRolloutRefWorker.__init__",
        names=("enable_routing_replay",),
    ),
    _worker("init_model", names=("actor", "reset")),
    # The routes of a request cover its prompt, and all of its tokens except the last; a resumed request keeps its
    # routes.
    _of_fsdp("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient")(
        "generate", name="routes of a resumed request", names=("routed_experts", "concatenate")
    ),
    _of_fsdp("verl.experimental.agent_loop.agent_loop:AgentLoopOutput")(
        "as_dict",
        "(self)",
        name="routes of an agent loop's output",
        keys=("routed_experts",),
        names=("int16", "new_zeros"),
    ),
)
"""Parts of verl that ``recipe.offpolicy.replay`` wraps, overrides or relies on."""

_megatron = _of_megatron("verl.workers.engine.megatron.transformer_impl:MegatronEngine")
_megatron_model = _of_megatron("verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead")
_utils = _of_megatron("verl.utils.megatron.router_replay_utils")
SEAMS_OF_MEGATRON = (
    _megatron_model(
        "prepare_model_inputs", "(self, batch)", name="prepare_model_inputs of Megatron", keys=("routed_experts",)
    ),
    _megatron_model(
        "forward_step",
        "(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
        name="forward_step of Megatron",
        names=("prepare_model_inputs", "set_router_replay_data", "unwrap_model"),
    ),
    _megatron(
        "forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        name="forward_backward_batch of Megatron",
        keys=("enable_routing_replay",),
        names=("forward_step", "clear_global_indices"),
    ),
    _utils("iter_model_routers", "(model)"),
    # If routes have one entry per layer, they are indexed by the layer's number, otherwise by the layer's position
    # among the layers with experts.
    _utils("set_router_replay_data", names=("num_layers", "is_moe_layer", "set_target_indices")),
    _of_megatron("verl.utils.megatron.router_replay_patch:RouterReplay")(
        "set_target_indices",
        "(self, topk_indices, replay_mask=None)",
        names=("target_topk_idx", "target_replay_mask"),
    ),
)
"""Functions that the Megatron monitoring reads; their modules import Megatron."""
