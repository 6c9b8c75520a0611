"""Contracts on what routing replay wraps in verl's engines and overrides in its workers; nothing is patched here.

In releases whose FSDP engine replays nothing itself, a subclass of verl's worker flags the batch as verl's own engines
want it, and three methods of the engine's instance are wrapped.
"""

from __future__ import annotations

from functools import partial

from .engine_loss import seam
from .releases import specifiers

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_WORKERS = "verl.workers.engine_workers"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"
_REPLAY = "verl.utils.megatron"
_seam = partial(seam, releases=specifiers(lambda release: release.fsdp_replay), option="router_replay")
_seam_of_megatron = partial(seam, releases=specifiers(lambda release: release.watched_replay), option="router_replay")

SEAMS = (
    _seam(
        "prepare_model_inputs",
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs",
        "(self, micro_batch)",
        keys=("input_ids", "position_ids"),
        names=("to_padded_tensor", "pad_packed_inputs"),
    ),
    _seam(
        "forward_step",
        f"{_ENGINE}:FSDPEngineWithLMHead.forward_step",
        "(self, micro_batch, loss_function, forward_only)",
        keys=("model_output",),
        names=("prepare_model_inputs", "prepare_model_outputs", "module"),
    ),
    _seam(
        "forward_backward_batch",
        f"{_ENGINE}:FSDPEngine.forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        names=("forward_step", "backward", "postprocess_batch_func"),
    ),
    _seam("eval_mode", f"{_ENGINE}:FSDPEngine.eval_mode", "(self, **kwargs)"),
    # The flag that tells an update from the reference's forward.
    _seam(
        "_with_routing_replay_flag",
        f"{_WORKERS}:_with_routing_replay_flag",
        "(enabled)",
        keys=("enable_routing_replay",),
    ),
    _seam(
        "ActorRolloutRefWorker.__init__",
        f"{_WORKERS}:ActorRolloutRefWorker.__init__",
        "(self, config, role, distillation_config=None, **kwargs)",
        names=("enable_routing_replay",),
    ),
    _seam("init_model", f"{_WORKERS}:ActorRolloutRefWorker.init_model", None, names=("actor", "reset")),
    # Routes of a request cover its prompt and all of its tokens but the last; a resumed one keeps those it had.
    _seam(
        "routes of a resumed request",
        "verl.workers.rollout.llm_server:FullyAsyncLLMServerClient.generate",
        None,
        names=("routed_experts", "concatenate"),
    ),
    _seam(
        "routes of an agent loop's output",
        "verl.experimental.agent_loop.agent_loop:AgentLoopOutput.as_dict",
        "(self)",
        keys=("routed_experts",),
        names=("int16", "new_zeros"),
    ),
)
"""What ``recipe.offpolicy.replay`` wraps, overrides or relies on."""
SEAMS_OF_MEGATRON = (
    _seam_of_megatron(
        "prepare_model_inputs of Megatron",
        f"{_MEGATRON}:MegatronEngineWithLMHead.prepare_model_inputs",
        "(self, batch)",
        keys=("routed_experts",),
    ),
    _seam_of_megatron(
        "forward_step of Megatron",
        f"{_MEGATRON}:MegatronEngineWithLMHead.forward_step",
        "(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
        names=("prepare_model_inputs", "set_router_replay_data", "unwrap_model"),
    ),
    _seam_of_megatron(
        "forward_backward_batch of Megatron",
        f"{_MEGATRON}:MegatronEngine.forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        keys=("enable_routing_replay",),
        names=("forward_step", "clear_global_indices"),
    ),
    _seam_of_megatron("iter_model_routers", f"{_REPLAY}.router_replay_utils:iter_model_routers", "(model)"),
    # Where routes have one entry for each layer, they are taken by its number, or else by its place among those with
    # experts.
    _seam_of_megatron(
        "set_router_replay_data",
        f"{_REPLAY}.router_replay_utils:set_router_replay_data",
        None,
        names=("num_layers", "is_moe_layer", "set_target_indices"),
    ),
    _seam_of_megatron(
        "set_target_indices",
        f"{_REPLAY}.router_replay_patch:RouterReplay.set_target_indices",
        "(self, topk_indices, replay_mask=None)",
        names=("target_topk_idx", "target_replay_mask"),
    ),
)
"""What the look at Megatron's routers reads; its modules import Megatron."""
