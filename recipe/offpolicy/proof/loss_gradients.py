"""Gradients of verl's loss and of the installed loss, and the evidence of a trial, for all parts of the proof."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch import micro_batch as mb
from ..batch.mini_batch_mean import mini_batch_mean
from ..batch.plan import SharedPlan
from ..correction import BatchConstants, CorrectionSpec
from ..correction.bounds import Side

BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""Loss function of (model_output, data)."""


class CorrectedLoss(Protocol):
    """Interface of the loss under proof, see ``worker.loss.OffPolicyLoss``."""

    spec: CorrectionSpec
    prove: bool
    shadows: dict[str, CorrectionSpec]
    moving: dict[str, Side]
    verl_loss: BoundLoss
    base_loss: BoundLoss
    extensions: Mapping[str, Any]
    actor_config: Any  # set if a penalty or an extension needs it

    def extended(self, base_loss: BoundLoss) -> BoundLoss: ...

    def __call__(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]: ...


@dataclass
class ShiftResult:
    """Gradient error of one correction on log-probs shifted beyond its bound.

    Attributes:
        error: largest difference between the observed and the expected gradient, relative to the larger of the expected
            and the uncorrected gradient.
        vacuous: the uncorrected gradient is zero, so the trial shows nothing.
    """

    error: float
    vacuous: bool


def base_gradient(base_loss: BoundLoss, batch: mb.MicroBatch, factor: Tensor) -> Tensor:
    """Compute verl's gradient at the log-probs with ``factor`` (B, T) as its weights: (total tokens,)."""
    output, leaf = batch.leaf()
    handed: dict[str, Any] = {
        "old_log_probs": batch.old_log_prob,
        mb.ROLLOUT_LOG_PROBS: batch.rollout_log_prob,  # read by a weighted KL term
        "advantages": batch.advantages,
        "response_mask": batch.response_mask,
        mb.WEIGHTS: (factor * batch.response_mask).to(batch.log_prob.dtype),
    }
    loss, _ = base_loss(output, batch.data_with(**handed))
    return torch.autograd.grad(loss, leaf)[0]


def relative_error(error: Tensor, scale: Tensor) -> float:
    return float(error / scale) if float(scale) else float(error)


def adapter_gradient(
    adapter: CorrectedLoss, spec: CorrectionSpec, moved: mb.MicroBatch, constants: BatchConstants
) -> Tensor:
    output, leaf = moved.leaf()
    changed = moved.data_with(
        SharedPlan(step=moved.plan.step if moved.plan else 1, constants=constants),
        old_log_probs=moved.old_log_prob,
        advantages=moved.advantages,
        response_mask=moved.response_mask,
        **{mb.ROLLOUT_LOG_PROBS: moved.rollout_log_prob, mb.WEIGHTS: None},
    )
    loss, _ = isolate(adapter, spec)(output, changed)
    return torch.autograd.grad(loss, leaf)[0]


def isolate(adapter: CorrectedLoss, spec: CorrectionSpec) -> CorrectedLoss:
    """Copy the installed loss with a single correction and without proof."""
    # This is a shallow copy of the installed loss, because a substitute class would prove nothing about that loss.
    alone = copy.copy(adapter)
    alone.spec, alone.prove, alone.shadows, alone.moving, alone.extensions = spec, False, {}, {}, {}
    return alone


def token_share(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> Tensor:
    """Compute each token's share of verl's mini-batch mean, including the denominator's scale: (B, T) float64."""
    leaf = torch.zeros_like(batch.log_prob, dtype=torch.float32, requires_grad=True)
    mean = mini_batch_mean(leaf, batch.response_mask, adapter.actor_config, batch.data)
    share = torch.autograd.grad(mean, leaf)[0].double()
    return share * batch.scale[:, None] if spec.recounts and batch.scale is not None else share


def penalty_gradient(adapter: CorrectedLoss, spec: CorrectionSpec, batch: mb.MicroBatch) -> Tensor:
    """Compute 2 c log r times each token's share of verl's mean, 0 where it is not finite: (total tokens,).

    Args:
        batch: micro-batch with the pi_old that the loss uses.
    """
    assert spec.penalty is not None
    share = token_share(adapter, replace(spec, denominator="original"), batch)
    other = batch.rollout_log_prob if spec.penalty.ratio == "full" else batch.old_log_prob
    slope = 2 * (batch.log_prob.detach().double() - other.double())
    there = batch.policy_mask & torch.isfinite(slope)
    return batch.spread(torch.where(there, spec.penalty.coefficient * slope * share, 0.0))
