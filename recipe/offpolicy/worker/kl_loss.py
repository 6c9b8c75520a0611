"""KL loss weighted by the clipped ratio pi / pi_old.

verl adds mean_t k(pi, pi_ref) to the loss as if its tokens came from the current policy. They come from pi_old, so
each term's gradient is due a ratio pi / pi_old, and that ratio a clip, as PPO's policy term has them (Liu et al. 2025,
Rethinking KL Regularization in RLHF).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import kl_penalty
from verl.utils.metric import Metric

from ..batch.micro_batch import pad_log_probs
from ..batch.mini_batch_mean import mini_batch_mean
from ..correction.ratios import EXP_CLAMP

BaseLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Takes (config, model_output, data, dp_group), as verl's ``ppo_loss``."""
BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Takes (model_output, data, dp_group)."""


def compute_clipped_kl(
    log_prob: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, *, kind: str, lower: float, upper: float
) -> Tensor:
    """Compute each token's KL surrogate, max(r k', clip(r, lower, upper) k') with r = pi / pi_old.

    k' = dk / dlog pi is what the KL loss of this kind pulls a log-prob down by, so that at r = 1 the gradient is that
    of k itself. It takes the place of PPO's negative advantage: the maximum, not the minimum, is the pessimistic side
    of something that is minimised.

    Args:
        log_prob: (B, T) log pi, carries the gradient.
        old_log_prob, ref_log_prob: (B, T).
        kind: verl's ``kl_loss_type``.

    Returns:
        (B, T).
    """
    leaf = log_prob.detach().clone().requires_grad_()
    with torch.enable_grad():
        penalty = kl_penalty(logprob=leaf, ref_logprob=ref_log_prob, kl_penalty=kind)
        slope = torch.autograd.grad(penalty.sum(), leaf)[0]
    ratio = torch.exp((log_prob - old_log_prob).clamp(-EXP_CLAMP, EXP_CLAMP))
    return torch.maximum(ratio * slope, ratio.clamp(lower, upper) * slope)


def replace_kl(base_loss: BaseLoss, config: Any, *, lower: float, upper: float) -> BoundLoss:
    """Replace the KL term of ``base_loss`` under ``config`` (verl's ActorConfig) by the clipped one."""
    plain = partial(base_loss, dataclasses.replace(config, use_kl_loss=False))
    return partial(_loss_with_clipped_kl, plain, config, lower, upper)


def _loss_with_clipped_kl(
    plain: BoundLoss,
    config: Any,
    lower: float,
    upper: float,
    model_output: Mapping[str, Any],
    data: TensorDict,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    loss, metrics = plain(model_output, data, dp_group)
    dense = data.select("response_mask", "old_log_probs", "ref_log_prob").to_padded_tensor()
    log_prob = pad_log_probs(model_output, data)
    reference, kind = dense["ref_log_prob"], config.kl_loss_type

    aggregate = partial(mini_batch_mean, response_mask=dense["response_mask"].to(bool), actor_config=config, data=data)
    surrogate = compute_clipped_kl(log_prob, dense["old_log_probs"], reference, kind=kind, lower=lower, upper=upper)
    penalty = aggregate(kl_penalty(log_prob.detach(), reference, kind))
    metrics = metrics | {
        "kl_loss": Metric(aggregation=metrics["actor/pg_loss"].aggregation, value=penalty),
        "kl_coef": config.kl_loss_coef,
    }
    return loss + config.kl_loss_coef * aggregate(surrogate), metrics
