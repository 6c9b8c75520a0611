"""Patch that makes verl's legacy FSDP actor use the engine path's loss in an update with a handover.

``update_policy`` selects only the columns in its own list, computes every mean over a micro-batch and, with one
mini-batch and one epoch, uses the current log-probs as pi_old. With this patch, the batch keeps this package's columns,
the totals of the whole mini-batch are sent with the batch, and the handover's ``Update`` handles the calls made by
``update_policy``. For a batch without a handover, only the number of dynamic micro-batches changes. In verl, each rank
chooses its own number, and a rank with fewer micro-batches than the others hangs in the next FSDP collective. With the
patch, all ranks use the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.utils.device import get_device_name

from ..contract import Seams
from ..deferred import ReleasePatch
from . import algorithms
from .algorithms import RELEASES, Logged, carried, handover_of
from .handover import mini_batch_columns

_MODULE = "dp_actor"
_PATH = f"verl.workers.actor.{_MODULE}"
_COLUMNS = ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "old_log_probs", "advantages")


def _update_policy(original: Callable[..., Any], actor: Any, data: Any) -> Any:
    handover = handover_of(data)
    if handover is None:
        return original(actor, data)
    # Ranks that share a sequence have the same rows.
    copies = actor.ulysses_sequence_parallel_size
    columns = mini_batch_columns(
        data.batch["response_mask"], actor.config.ppo_mini_batch_size, partial(_over_ranks, copies)
    )
    dp_size = torch.distributed.get_world_size() // copies
    current = handover.update(actor.config, dp_size=dp_size, upstream=partial(_upstream, actor.scaler))
    with algorithms.update(current):
        metrics = original(actor, carried(data, **columns))
    current.end(metrics)
    return metrics


def _over_ranks(copies: int, numbers: Tensor) -> Tensor:
    total = numbers.to(get_device_name())
    torch.distributed.all_reduce(total)
    return total.to(numbers.device) // copies


def _prepare_dynamic_batch(
    original: Callable[..., Any], data: Any, max_token_len: int, dp_group: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if dp_group is None:
        # The group contains all ranks, because FSDP's collectives span all of them and ranks that share a sequence have
        # the same rows. None if this process is not in a group.
        dp_group = torch.distributed.group.WORLD
    return original(data, max_token_len, dp_group, *args, **kwargs)


def _forward_micro_batch(
    original: Callable[..., Any], actor: Any, micro_batch: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    outputs = original(actor, micro_batch, *args, **kwargs)
    update = algorithms.running()
    if update is None or not torch.is_grad_enabled():
        return outputs
    if not isinstance(outputs, Mapping):
        raise ValueError(
            "actor_rollout_ref.actor.use_prefix_grouper=true: the forward pass of verl's prefix grouper returns a "
            "tuple, which verl's own update cannot read. Set it to false."
        )
    update.begin(micro_batch, scale=_scale(actor, micro_batch))
    return outputs


def _scale(actor: Any, micro_batch: Mapping[str, Any]) -> float:
    """Return the factor by which ``update_policy`` scales a micro-batch's loss; the proof finds it in the gradient."""
    if actor.config.use_dynamic_bsz:
        return len(micro_batch["response_mask"]) / actor.config.ppo_mini_batch_size
    return 1 / actor.gradient_accumulation


def _upstream(scaler: Any) -> float:
    """Return the gradient from which fp16 training starts its backward pass."""
    return 1.0 if scaler is None else float(scaler.get_scale())


_actor = Seams(f"{_PATH}:DataParallelPPOActor", RELEASES)
PATCH = ReleasePatch(
    (
        *algorithms.list_wrappers(_MODULE),
        (
            Seams(_PATH, RELEASES)(
                "prepare_dynamic_batch(data, max_token_len, dp_group=None, num_batches_divided_by=None, "
                "same_micro_num_in_dp=True, min_num_micro_batch=None, use_dynamic_bsz_balance=True)",
                name=f"{_MODULE}.prepare_dynamic_batch",
            ),
            _prepare_dynamic_batch,
        ),
        (
            _actor(
                "_forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False)",
                name=f"{_MODULE}.forward_micro_batch",
                keys="log_probs",
            ),
            _forward_micro_batch,
        ),
        (
            Logged(
                f"{_MODULE}.update_policy",
                f"{_PATH}:DataParallelPPOActor.update_policy",
                "(self, data)",
                "verl",
                RELEASES,
                keys=(_COLUMNS, "rollout_log_probs", "rollout_is_weights", "ref_log_prob", "log_probs"),
            ),
            _update_policy,
        ),
    ),
    _PATH,
)
