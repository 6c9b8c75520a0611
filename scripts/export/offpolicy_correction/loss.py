"""Loss of the actor: verl's ``ppo_loss`` with the weights weight * keep, and the check that they reach the gradient.

``TrainingWorker.set_loss_fn`` sends the loss to the workers by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from .check import try_parts, watch
from .correction import Correction, compute_factor

WEIGHTS = "rollout_is_weights"
COLUMNS = ("response_mask", "old_log_probs", "rollout_log_probs", "advantages")
PREFIX = "offpolicy"


@dataclass
class Batch:
    """A micro-batch; each tensor is (B, T) and padded on the right."""

    log_prob: Tensor
    response_mask: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor


def read(model_output: Mapping[str, Any], data: TensorDict) -> Batch:
    """Read and pad the columns of a micro-batch.

    Raises:
        KeyError: a column is missing.
        ValueError: verl's own rollout correction has set weights.
    """
    if missing := [name for name in COLUMNS if name not in data.keys()]:
        raise KeyError(
            f"{missing[0]} is not in the micro-batch. Set actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    if WEIGHTS in data.keys():
        raise ValueError(f"{WEIGHTS} is already in the micro-batch. Set algorithm.rollout_correction.rollout_is=null.")
    columns = data.select(*COLUMNS).to_padded_tensor()
    named = {name: columns[name] for name in COLUMNS}
    named["response_mask"] = named["response_mask"].bool()
    return Batch(log_prob=no_padding_2_padding(model_output["log_probs"], data), **named)


class CorrectedLoss:
    """verl's policy loss with a correction.

    Args:
        correction: the correction to apply.
        actor_config: verl's ActorConfig, in the form that ``ppo_loss`` requires.

    Attributes:
        tried: whether the parts have already been tried in this process.
        random_state: state of the CPU generator before the last loss; clip_cov draws at random which tokens it clips.
    """

    def __init__(self, correction: Correction, actor_config: Any) -> None:
        self.correction = correction
        self.actor_config = actor_config
        self.tried = False
        self.random_state = torch.get_rng_state()

    def __call__(
        self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute loss and metrics of a micro-batch.

        Raises:
            NotLive: the correction does not reach the gradient as its formulas require; this is raised here, or in the
                backward pass.
        """
        batch = read(model_output, data)
        factor, sums = self.compute_factor(batch)
        self.random_state = torch.get_rng_state()
        loss, metrics = self.compute_loss(model_output, data, batch, factor, dp_group)
        metrics = {**metrics, **_report(sums, data)}
        if torch.is_grad_enabled() and model_output["log_probs"].requires_grad:
            if not self.tried and batch.response_mask.any():
                try_parts(self, model_output, data, batch)
                self.tried = True
            metrics[f"{PREFIX}/live/tokens"] = watch(self, model_output, data, batch, factor, loss)
        return loss, metrics

    def compute_factor(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return compute_factor(
            self.correction,
            old_log_prob=batch.old_log_probs,
            rollout_log_prob=batch.rollout_log_probs,
            log_prob=batch.log_prob.detach(),
            response_mask=batch.response_mask,
            advantages=batch.advantages,
        )

    def compute_loss(
        self, model_output: Mapping[str, Any], data: TensorDict, batch: Batch, factor: Tensor, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute verl's loss under the weights ``factor``, (B, T)."""
        # A token without a finite pi_old has factor 0, but NaN times 0 would still be NaN.
        finite = torch.isfinite(batch.old_log_probs)
        given = data.select(*data.keys())
        given["response_mask"] = batch.response_mask
        given["advantages"] = batch.advantages
        given["old_log_probs"] = torch.where(finite, batch.old_log_probs, batch.log_prob.detach())
        given[WEIGHTS] = factor
        return ppo_loss(self.actor_config, model_output, given, dp_group)

    def repeat_loss(
        self, model_output: Mapping[str, Any], data: TensorDict, batch: Batch, factor: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute a loss with the random numbers of the last loss, leaving the generator's state unchanged."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            return self.compute_loss(model_output, data, batch, factor)


def _report(sums: dict[str, Tensor], data: TensorDict) -> dict[str, Metric]:
    """Build metrics that verl sums over micro-batches and averages over ranks: means over the mini-batch's tokens."""
    tokens = max(data["batch_num_tokens"] or 1, 1) / data["dp_size"]
    return {f"{PREFIX}/{name}": Metric(AggregationType.SUM, float(each) / tokens) for name, each in sums.items()}
