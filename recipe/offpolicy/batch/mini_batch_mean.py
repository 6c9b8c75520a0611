"""verl's mini-batch mean of per-token values, as its own loss takes it in each micro-batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import Tensor

from verl.trainer.ppo.core_algos import agg_loss


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
        # In a mini-batch without tokens every sum is 0, and so is the mean.
        batch_num_tokens=max(data["batch_num_tokens"], 1),
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=actor_config.loss_scale_factor,
    )
