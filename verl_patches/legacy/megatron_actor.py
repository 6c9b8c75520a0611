"""Patch that makes verl's legacy Megatron actor use the engine path's loss in an update with a handover.

``make_minibatch_iterator`` selects only the columns in its own list, and the closure that computes the loss on the last
pipeline stage passes neither mu nor its micro-batch to the policy loss. With this patch, the batch keeps this package's
columns, the totals of each mini-batch are added before the mini-batch is split, and each micro-batch is recorded when
Megatron's schedule takes it. On the last stage, a micro-batch's loss is computed within the same forward step, even
with interleaved virtual stages. A batch without a handover is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config
from torch import Tensor

from verl.utils.device import get_device_id

from ..contract import Seams
from ..deferred import ReleasePatch
from . import algorithms
from .algorithms import RELEASES, Logged, carried, handover_of
from .handover import LegacyHandover, Update, mini_batch_columns

_MODULE = "megatron_actor"
_PATH = f"verl.workers.actor.{_MODULE}"
_COLUMNS = ("responses", "input_ids", "attention_mask", "response_mask", "position_ids", "old_log_probs", "advantages")


@dataclass(frozen=True)
class Dealt:
    """The mini-batches of one update, together with the handover of the batch from which they were split."""

    mini_batches: Iterable[Any]
    handover: LegacyHandover

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mini_batches)


def _make_minibatch_iterator(original: Callable[..., Any], actor: Any, data: Any) -> Any:
    handover = handover_of(data)
    if handover is None:
        return original(actor, data)
    return Dealt(original(actor, carried(data)), handover)


def _update_policy(original: Callable[..., Any], actor: Any, dataloader: Any, enable_mtp: bool = False) -> Any:
    if not isinstance(dataloader, Dealt):
        return original(actor, dataloader, enable_mtp)
    _refuse(actor)
    upstream = partial(_upstream, get_model_config(actor.actor_module[0]).grad_scale_func)
    dp_size = mpu.get_data_parallel_world_size()
    current = dataloader.handover.update(actor.config, dp_size=dp_size, upstream=upstream)
    with algorithms.update(current):
        metrics = original(actor, dataloader, enable_mtp)
    current.end(metrics)
    return metrics


def _upstream(grad_scale: Callable[[Tensor], Tensor] | None) -> float:
    """Return the gradient at the start of the backward pass: the loss scale in fp16 training, otherwise 1."""
    return 1.0 if grad_scale is None else float(grad_scale(torch.ones(())))


def _refuse(actor: Any) -> None:
    """Reject schedules in which the loss may belong to a micro-batch other than the one taken last."""
    key = "actor_rollout_ref.actor.megatron.override_transformer_config"
    if actor.tf_config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            f"{key}.overlap_moe_expert_parallel_comm=true: the schedule takes a micro-batch while the loss of another "
            f"one is computed, so the correction cannot match them. Set it to false."
        )


def _forward_backward_batch(original: Callable[..., Any], actor: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    if algorithms.running() is not None:
        # Mini-batches are yielded one at a time, in the order in which they were split, shuffled or not.
        for key, column in mini_batch_columns(data.batch["response_mask"], len(data), _over_ranks).items():
            data.batch[key] = column
    return original(actor, data, *args, **kwargs)


def _over_ranks(numbers: Tensor) -> Tensor:
    total = numbers.to(get_device_id())
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
    return total.to(numbers.device)


def _make_batch_generator(original: Callable[..., Any], batches: Sequence[Any], vpp_size: int) -> Any:
    current = algorithms.running()
    made = original(batches, vpp_size)
    if current is None:
        return made
    # Megatron's schedules multiply by the number of context-parallel ranks and divide by the number of micro-batches.
    scale = mpu.get_context_parallel_world_size() / len(batches)
    # There is one iterator, or one for each virtual stage.
    if vpp_size > 1:
        return [_noted(stage, current, scale) for stage in made]
    return _noted(made, current, scale)


def _noted(micro_batches: Iterator[Any], current: Update, scale: float) -> Iterator[Any]:
    """Yield the micro-batches; the update starts each micro-batch when it is requested."""
    for micro_batch in micro_batches:
        # verl moves the micro-batch to the device next, which then has no effect.
        rows = micro_batch.to(get_device_id())
        current.begin(rows, scale=scale)
        yield rows


_actor = Seams(f"{_PATH}:MegatronPPOActor", RELEASES)
PATCH = ReleasePatch(
    (
        *algorithms.list_wrappers(_MODULE),
        (
            _actor(
                "make_minibatch_iterator(self, data)",
                name=f"{_MODULE}.make_minibatch_iterator",
                keys=(_COLUMNS, "rollout_log_probs", "rollout_is_weights", "ref_log_prob"),
            ),
            _make_minibatch_iterator,
        ),
        (
            Logged(
                f"{_MODULE}.update_policy",
                f"{_PATH}:MegatronPPOActor.update_policy",
                "(self, dataloader, enable_mtp=False)",
                "verl",
                RELEASES,
            ),
            _update_policy,
        ),
        (
            _actor(
                "forward_backward_batch(self, data, forward_only=False, post_process_fn=None, calculate_entropy=False, "
                "use_dynamic_bsz=False, micro_batch_size=None, max_token_len=None, mini_batch_size=None)",
                name=f"{_MODULE}.forward_backward_batch",
                keys="log_probs rollout_log_probs rollout_is_weights",
            ),
            _forward_backward_batch,
        ),
        (
            Seams(_PATH, RELEASES)("make_batch_generator(batches, vpp_size)", name=f"{_MODULE}.make_batch_generator"),
            _make_batch_generator,
        ),
    ),
    _PATH,
)
