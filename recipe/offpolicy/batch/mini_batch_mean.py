"""verl's mini-batch mean, as verl's own loss computes it in each micro-batch, and checks of its denominators.

verl adds up the losses of micro-batches and ranks. ``agg_loss`` divides each loss by ``batch_num_tokens`` or by
``global_batch_size``, and multiplies it by ``dp_size``, because the engine averages gradients over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu

from ..correction.deferred_value import DeferredValue
from .seals import LivenessError, SealError

Shares = dict[str, float]
"""Maps each of verl's denominators to the share that some micro-batches contribute to it together. All micro-batches of
an optimizer step, over all ranks, contribute a share of 1."""
_TOKENS, _ROWS = "batch_num_tokens", "global_batch_size"


def mini_batch_mean(values: Tensor, response_mask: Tensor, actor_config: Any, data: TensorDict) -> Tensor:
    """Aggregate (B, T) values by ``loss_agg_mode``, with the denominators of the mini-batch over all ranks.

    Args:
        actor_config: verl's ActorConfig.
        data: the micro-batch that the engine hands to its loss.
    """
    return agg_loss(
        values,
        response_mask,
        actor_config.loss_agg_mode,
        dp_size=data["dp_size"],
        # In a mini-batch without tokens, every sum is 0, so the mean is 0 too.
        batch_num_tokens=max(data["batch_num_tokens"], 1),
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=actor_config.loss_scale_factor,
    )


def check_ranks(data: TensorDict, dp_group: Any) -> None:
    """Check that ``dp_size`` is the size of the engine's group of data-parallel ranks, if both are known.

    Raises:
        SealError: the two differ.
    """
    sent = tu.get_non_tensor_data(data, "dp_size", None)
    if dp_group is None or sent is None or sent == (ranks := torch.distributed.get_world_size(dp_group)):
        return
    raise SealError(
        f"dp_size, by which verl multiplies the loss, is {sent} in a micro-batch of {ranks} data-parallel ranks. Code "
        f"between engine and loss changed it. The optimizer has not stepped."
    )


def defer_shares(response_mask: Tensor, data: TensorDict) -> DeferredValue[Shares]:
    """Compute the share of each denominator that this micro-batch contributes; empty if verl sent none (legacy actors).

    The share of a denominator of 0 is infinite, or NaN for a mini-batch without tokens.
    """
    rows = len(response_mask)
    sent = {name: tu.get_non_tensor_data(data, name, None) for name in (_TOKENS, _ROWS)}

    def divide(tokens: list[int]) -> Shares:
        filled = {_TOKENS: tokens[0], _ROWS: rows}
        return {name: _divide(filled[name], of) for name, of in sent.items() if of is not None}

    return DeferredValue(response_mask.sum()[None], divide)


def _divide(filled: int, of: float) -> float:
    return filled / of if of else math.inf if filled else math.nan


def add_shares(parts: Iterable[Shares]) -> Shares:
    """Add the shares of micro-batches; the sum is infinite if any share is, even if another share is NaN."""
    found: dict[str, list[float]] = {}
    for part in parts:
        for name, share in part.items():
            found.setdefault(name, []).append(share)
    return {name: math.inf if math.inf in shares else math.fsum(shares) for name, shares in found.items()}


def check_shares(shares: Shares, steps: int) -> None:
    """Check that an update's micro-batches add up to each denominator once per optimizer step.

    Raises:
        LivenessError: they do not.
    """
    for name, share in shares.items():
        if not (math.isnan(share) or abs(share - steps) <= 1e-6 * max(steps, 1)):
            raise LivenessError(
                f"{name}, by which verl divides the loss, does not match its mini-batches: they add up to {share:.6g} "
                f"times its value in {steps} optimizer steps. Code between trainer and loss changed it, so the loss "
                "was scaled."
            )
