"""Contracts on the functions of verl's workers and engines that compute the loss, and the two patches of these
functions.

The trainer sends a loss to the workers with ``set_loss_fn``, and the engine calls this loss on each micro-batch. The
loss calls verl's ``ppo_loss``, which multiplies the policy term by ``rollout_is_weights``. The signatures are quoted
from the named releases and are the same in all of them. They are checked before a run starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from .contract import Seams, wrap
from .releases import specifiers

_WORKERS = "verl.workers.engine_workers"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_MEGATRON = "verl.workers.engine.megatron.transformer_impl"

_worker = Seams(f"{_WORKERS}:ActorRolloutRefWorker")
_training_worker = Seams(f"{_WORKERS}:TrainingWorker")
_algorithm = Seams("verl.trainer.ppo.core_algos")
_POSTPROCESS_OUTPUT = _training_worker(
    "_postprocess_output(self, output, *, global_token_num, delta_time, forward_only, images_seqlens)", keys="metrics"
)
LOSS = (
    _worker("set_loss_fn(self, loss_fn)"),
    _worker("update_actor(self, data)"),
    # This key tells the loss which mini-batch is the last one of an update.
    _training_worker("train_mini_batch(self, data)", keys="update_lr_scheduler"),
    _POSTPROCESS_OUTPUT,
    Seams("verl.workers.utils.losses")(
        "ppo_loss(config, model_output, data, dp_group=None)",
        keys="response_mask old_log_probs advantages rollout_is_weights",
    ),
    _algorithm("kl_penalty(logprob, ref_logprob, kl_penalty)"),
    _algorithm(
        "agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, "
        "loss_scale_factor=None)"
    ),
    Seams("verl.workers.utils.padding")("no_padding_2_padding(tensor, data)"),
)
"""All functions of verl's workers that this package's code on the engine path calls or is called by."""

_of_replay = partial(Seams, releases=specifiers(attrgetter("fsdp_replay")), option="router_replay")
_engine = _of_replay(f"{_FSDP}:FSDPEngine")
_language_model = _of_replay(f"{_FSDP}:FSDPEngineWithLMHead")
_replaying_worker = _of_replay(f"{_WORKERS}:ActorRolloutRefWorker")
ROUTER_REPLAY = (
    _language_model(
        "prepare_model_inputs(self, micro_batch)",
        keys="input_ids position_ids",
        names="to_padded_tensor pad_packed_inputs",
    ),
    _language_model(
        "forward_step(self, micro_batch, loss_function, forward_only)",
        keys="model_output",
        names="prepare_model_inputs prepare_model_outputs module",
    ),
    _engine(
        "forward_backward_batch(self, data, loss_function, forward_only=False)",
        names="forward_step backward postprocess_batch_func",
    ),
    _engine("eval_mode(self, **kwargs)"),
    # The flag that distinguishes an update from the forward pass of the reference policy.
    _of_replay(_WORKERS)("_with_routing_replay_flag(enabled)", keys="enable_routing_replay"),
    _replaying_worker(
        "__init__(self, config, role, distillation_config=None, **kwargs)",
        name="ActorRolloutRefWorker.__init__",
        names="enable_routing_replay",
    ),
    _replaying_worker("init_model", names="actor reset"),
    # The routes of a request cover its prompt, and all of its tokens except the last; a resumed request keeps its
    # routes.
    _of_replay("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient")(
        "generate", name="routes of a resumed request", names="routed_experts concatenate"
    ),
    _of_replay("verl.experimental.agent_loop.agent_loop:AgentLoopOutput")(
        "as_dict(self)", name="routes of an agent loop's output", keys="routed_experts", names="int16 new_zeros"
    ),
)
"""Parts of verl that ``recipe.offpolicy.replay`` wraps, overrides or relies on. In releases whose FSDP engine has no
replay, a subclass of verl's worker sets the batch flag that verl's own engines expect, and three methods of the
engine's instance are wrapped."""

_of_megatron = partial(Seams, releases=specifiers(attrgetter("watched_replay")), option="router_replay")
_megatron_model = _of_megatron(f"{_MEGATRON}:MegatronEngineWithLMHead")
_routes = _of_megatron("verl.utils.megatron.router_replay_utils")
MEGATRON_REPLAY = (
    _megatron_model(
        "prepare_model_inputs(self, batch)", name="prepare_model_inputs of Megatron", keys="routed_experts"
    ),
    _megatron_model(
        "forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
        name="forward_step of Megatron",
        names="prepare_model_inputs set_router_replay_data unwrap_model",
    ),
    _of_megatron(f"{_MEGATRON}:MegatronEngine")(
        "forward_backward_batch(self, data, loss_function, forward_only=False)",
        name="forward_backward_batch of Megatron",
        keys="enable_routing_replay",
        names="forward_step clear_global_indices",
    ),
    _routes("iter_model_routers(model)"),
    # Routes with one entry per layer are indexed by the layer's number; other routes are indexed by the layer's
    # position among the layers with experts.
    _routes("set_router_replay_data", names="num_layers is_moe_layer set_target_indices"),
    _of_megatron("verl.utils.megatron.router_replay_patch:RouterReplay")(
        "set_target_indices(self, topk_indices, replay_mask=None)", names="target_topk_idx target_replay_mask"
    ),
)
"""Functions that the Megatron monitoring reads; their modules import Megatron."""

_of_lr = partial(Seams, releases=specifiers(attrgetter("scales_lr")), option="ess_lr")
_stepping_engine = _of_lr(f"{_FSDP}:FSDPEngine")
OPTIMIZER = (
    _of_lr("verl.workers.engine.base:BaseEngine")(
        "train_batch(self, data, loss_function)", names="forward_backward_batch optimizer_step"
    ),
    _stepping_engine("optimizer_step(self)", names="optimizer step"),
    _stepping_engine("lr_scheduler_step(self)", names="lr_scheduler get_last_lr"),
    _of_lr(f"{_WORKERS}:ActorRolloutRefWorker")("init_model", name="init_model of the optimizer", names="actor reset"),
)
"""Parts of verl that ``recipe.offpolicy.extensions.vcpo`` wraps or relies on."""

PADDING = Seams("verl.workers.utils.losses")("no_padding_2_padding(tensor, data)", name="response_padding")
METRICS = replace(_POSTPROCESS_OUTPUT, name="sent_metrics")
PATCHES = (PADDING, METRICS)


@dataclass(frozen=True)
class Padded:
    """Response log-probs that the patched ``no_padding_2_padding`` returns unchanged.

    verl slices the log-probs from the model output row by row, with three device synchronisations per row. The
    correction needs padded log-probs earlier, so it pads all rows at once.

    Attributes:
        tensor: (B, T), the model's log-prob at each response token; differentiable.
    """

    tensor: Any


def accept_padded() -> None:
    """Let verl's loss accept ``Padded`` in this process. Idempotent; later calls cost almost nothing.

    Raises:
        PatchError: the target has changed.
    """
    if not PADDING.in_force():
        wrap(PADDING, _padded)


def _padded(target: Callable[..., Any], tensor: Any, data: Any) -> Any:
    return tensor.tensor if isinstance(tensor, Padded) else target(tensor, data)


def complete_sent_metrics() -> None:
    """Complete the metrics of a loss before verl's worker sends them to other processes. Idempotent.

    verl gathers the metrics of a mini-batch over ranks in ``_postprocess_output``, only on the ranks whose metrics are
    used. If this process has verl's worker, this patch calls ``complete`` after the backward passes.

    Raises:
        PatchError: the target has changed.
    """
    if _WORKERS in sys.modules and not METRICS.in_force():
        wrap(METRICS, _postprocess_output)


def _postprocess_output(original: Callable[..., Any], worker: Any, output: Any, **kwargs: Any) -> Any:
    complete(output["metrics"])
    return original(worker, output, **kwargs)


def complete(metrics: Mapping[str, Any]) -> None:
    """Call ``before_sending()`` of every metric that has this method, including metrics inside lists."""
    for value in metrics.values():
        _complete(value)


def _complete(value: Any) -> None:
    if isinstance(value, list | tuple):
        for each in value:
            _complete(each)
    elif (ready := getattr(value, "before_sending", None)) is not None:
        ready()
