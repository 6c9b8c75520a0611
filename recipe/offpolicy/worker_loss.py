"""The loss that runs in the worker: weight x keep into verl's own policy loss, statistics and proof out.

The seam is verl's ``TrainingWorker.set_loss_fn(self, loss_fn)``, the same from 0.7.1 to 0.9.1, whose function the
engine calls at each micro-batch. It is handed over by value, so the spec never travels through a config that workers
copied earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from . import micro_batch as mb
from .alignment import tally
from .arrival import check_zeros
from .attribution.statistics import attributed
from .calibration.online_bounds import bounds_of, fingerprint, with_bounds
from .calibration.online_histogram import Side, measured
from .correction import CorrectionSpec, Statistic, StepStage, turns
from .correction.proximal import OF_THE_TRAINER
from .correction.statistics import to_host
from .kl_term import BaseLoss, BoundLoss, with_clipped_kl
from .packet import METRIC_KEY, Packet
from .proof import prove
from .recording.settings import RecordSettings
from .recording.source import recorded
from .versions import token_versions

_FATAL = {
    "nonfinite/log_prob": "log-probs of the current policy (its weights or its forward pass have diverged)",
    "nonfinite/advantages": "advantages (a reward or its normalisation is broken)",
}


class OffPolicyLoss:
    """verl's ``ppo_loss`` with a correction in its policy term.

    Args:
        spec: the correction; with nothing configured the loss and its gradient are verl's own, to the bit.
        actor_config: verl's ActorConfig, as ``ppo_loss`` takes it.
        prove: report the proof of life at every micro-batch.
        shadows: corrections to report on without applying them, by name.
        record: what to record, where the trainer's plan announces it.
        moving: masks whose bounds come with each update, in the trainer's plan, and the sides that move.
        base_loss: takes (config, model_output, data, dp_group).

    Attributes:
        spec: the correction, under the bounds of the update that it last saw.
        fingerprint: of what does not move.
        verl_loss: the base loss as verl runs it.
        base_loss: the same, with the KL term as the correction wants it.
    """

    def __init__(
        self,
        spec: CorrectionSpec,
        actor_config: Any,
        *,
        prove: bool = False,
        shadows: Mapping[str, CorrectionSpec] | None = None,
        record: RecordSettings | None = None,
        moving: Mapping[str, Side] | None = None,
        base_loss: BaseLoss = ppo_loss,
    ) -> None:
        self.spec = spec
        self.prove = prove
        self.shadows = dict(shadows or {})
        self.record = record
        self.moving = dict(moving or {})
        self.fingerprint = fingerprint(spec, self.moving)
        self.verl_loss: BoundLoss = partial(base_loss, actor_config)
        self.base_loss: BoundLoss = self.verl_loss
        if spec.kl_clip is not None:
            lower, upper = spec.kl_clip
            self.base_loss = with_clipped_kl(base_loss, actor_config, lower=lower, upper=upper)

    def __call__(
        self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The engine's loss: (scalar loss, metrics), the metrics with a packet under ``METRIC_KEY``.

        Raises:
            FloatingPointError: a log-prob of the current policy or an advantage is not finite; raised before the
                backward pass.
        """
        if self.spec.is_none:
            packet = Packet(self.fingerprint)
            loss, metrics = self.base_loss(model_output, data, dp_group)
            if mb.ROLLOUT_LOG_PROBS in data.keys():
                packet.statistics = self.statistics(mb.read(model_output, data), data)
        else:
            batch = mb.read(model_output, data)
            if self.moving:
                self.spec = with_bounds(self.spec, mb.bounds(batch, self.moving))
            packet = self.packet_of(batch)
            loss, metrics, packet.statistics = self.corrected(batch, model_output, data, dp_group)
            if self.prove and torch.is_grad_enabled():
                packet.proof = prove(self, batch, model_output, data, loss)
        return loss, {**metrics, METRIC_KEY: packet}

    def packet_of(self, batch: mb.MicroBatch) -> Packet:
        """A packet that says which rollout's log-probs, and which bounds, this micro-batch came with."""
        packet = Packet(self.fingerprint, bounds=bounds_of(self.spec, self.moving))
        if torch.is_grad_enabled():
            packet.histograms = self._histograms(batch)
            packet.rows = mb.row_checksums(batch.responses, batch.response_mask, batch.rollout_log_prob)
            if self.spec.proximal != "recompute":
                check_zeros(batch.rollout_log_prob, batch.log_prob.detach(), batch.response_mask)
                packet.alignment = tally(batch.log_prob.detach(), batch.rollout_log_prob, batch.response_mask)
        return packet

    def corrected(
        self,
        batch: mb.MicroBatch,
        model_output: Mapping[str, Any],
        data: TensorDict,
        dp_group: Any = None,
    ) -> tuple[Tensor, dict[str, Any], dict[str, Statistic]]:
        """verl's loss with the correction in it: (scalar loss, verl's metrics, statistics in floats)."""
        if mb.WEIGHTS in data.keys():
            raise ValueError(
                f"the micro-batch already holds {mb.WEIGHTS}: verl's own algorithm.rollout_correction is on beside "
                f"correction. Set algorithm.rollout_correction.rollout_is=null, or correction=none."
            )
        step = mb.decide(self.spec, batch)
        statistics = to_host(step.statistics)
        for name, what in _FATAL.items():
            if bad := statistics[name].value():
                raise FloatingPointError(
                    f"{bad:.0f} {what} are not finite, and no mask can keep that out of the gradient. "
                    f"The optimizer has not stepped."
                )
        statistics |= self._recorded(batch, step, data)
        loss, metrics = self.base_loss(model_output, self.hand_over(batch, step, data), dp_group)
        return loss, metrics, statistics | self._attributed(batch) | self._shadow_statistics(batch)

    def statistics(self, batch: mb.MicroBatch, data: TensorDict) -> dict[str, Statistic]:
        """What there is to report of a micro-batch that is not corrected, in floats."""
        step = mb.decide(self.spec, batch)
        statistics = to_host(step.statistics) | self._attributed(batch)
        return statistics | self._recorded(batch, step, data) | self._shadow_statistics(batch)

    def hand_over(self, batch: mb.MicroBatch, step: StepStage, data: TensorDict) -> TensorDict:
        """The micro-batch that verl's loss sees: weight x keep, (B, T), and pi_old, with a stand-in if not finite."""
        old_log_prob = mb.proximal(self.spec, batch)
        stand_in = batch.log_prob.detach().to(old_log_prob.dtype)
        old_log_prob = torch.where(torch.isfinite(old_log_prob), old_log_prob, stand_in)
        return mb.with_tensors(data, **{mb.WEIGHTS: mb.factor(self.spec, batch, step), "old_log_probs": old_log_prob})

    def _recorded(self, batch: mb.MicroBatch, step: StepStage, data: TensorDict) -> dict[str, Statistic]:
        return {} if self.record is None else recorded(self.record, self.spec, batch, step, data)

    def _attributed(self, batch: mb.MicroBatch) -> dict[str, Statistic]:
        return attributed(
            rollout_log_prob=batch.rollout_log_prob,
            old_log_prob=mb.proximal(self.spec, batch),
            log_prob=batch.log_prob,
            response_mask=batch.response_mask,
            staleness=mb.staleness(batch) if self.spec.proximal in OF_THE_TRAINER else None,
        )

    def _histograms(self, batch: mb.MicroBatch) -> dict[str, Statistic]:
        if not self.moving:
            return {}
        return measured(
            self.spec,
            self.moving,
            old_log_prob=mb.proximal(self.spec, batch),
            rollout_log_prob=batch.rollout_log_prob,
            log_prob=batch.log_prob,
            response_mask=batch.response_mask,
            advantages=batch.advantages,
            segment_ids=turns(batch.response_mask),
            versions=token_versions(batch.versions, batch.response_mask) if "version" in self.spec.levels else None,
            staleness=mb.staleness(batch),
        )

    def _shadow_statistics(self, batch: mb.MicroBatch) -> dict[str, Statistic]:
        return to_host(mb.decide_shadows(self.spec, self.shadows, batch)) if self.shadows else {}


def loss_of(
    config: DictConfig,
    spec: CorrectionSpec,
    shadows: Mapping[str, CorrectionSpec],
    *,
    prove: bool,
    moving: Mapping[str, Side] | None = None,
) -> OffPolicyLoss:
    """The loss of a run, ready to be handed to the workers of the engine path."""
    actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    record = RecordSettings.from_config(config)
    return OffPolicyLoss(spec, actor_config, prove=prove, shadows=shadows, record=record, moving=moving)
