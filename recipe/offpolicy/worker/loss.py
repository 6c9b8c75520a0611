"""The worker's loss: passes weight * keep to verl's policy loss, and reports statistics and the proof.

verl's ``TrainingWorker.set_loss_fn(self, loss_fn)``, unchanged from 0.7.1 to 0.9.1, sets the function that the engine
calls on each micro-batch. The loss is sent by value, so its spec never depends on a config that workers copied earlier.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss
from verl_patches import worker_seams

from ..batch import micro_batch as mb
from ..batch.padding import split_micro_batch
from ..batch.plan import check_ranks, defer_shares, mini_batch_mean
from ..correction import CorrectionSpec, Statistic, StepStage
from ..correction.spec import Side, compute_fingerprint, read_bounds, replace_bounds
from ..correction.statistics import DeferredValue, defer_statistics, fetch
from ..extensions.add_on import WorkerExtension
from ..extensions.batch_view import LossRows
from ..proof.gradient import prove
from ..proof.rollout_log_probs import find_zero_rows
from ..recording.run import RecordSettings
from ..recording.worker_hook import record
from .metrics import METRIC_KEY, Ledger, Observation, Packet, merge_metrics
from .terms import (
    BaseLoss,
    BoundLoss,
    LikeliestTokens,
    choose_surrogate,
    compute_centering_term,
    compute_penalty,
    measure_drift,
    replace_kl,
)


def expected_scale(loss: Tensor, data: TensorDict) -> Tensor | float | None:
    """Compute the gradient with which the engine's backward pass should start at a micro-batch's loss.

    verl's loss uses the denominators of the whole mini-batch, so gradient accumulation does not scale it. FSDP starts
    with 1, or with the loss scale of fp16 training. verl's Megatron engine multiplies by the number of micro-batches,
    because Megatron's schedule divides by this number. In addition, either the schedule multiplies by the number of
    context-parallel ranks, because gradients are averaged over these ranks, or verl multiplies by the number of routed
    tokens, because gradients are divided by this number. The loss scale is applied last.

    Args:
        loss: scalar.
        data: the micro-batch as the engine passes it to the loss, which calls this function.

    Returns:
        The factor, as a tensor on the device if reading it would synchronise; None if the factor is unknown, for
        example with Megatron's dynamic context parallelism.
    """
    # The engine does not pass itself to its loss, so it is looked up in the calling frames.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not hasattr(frame.f_locals.get("self"), "forward_backward_batch"):
        frame = frame.f_back
    engine = None if frame is None else frame.f_locals["self"]
    if (scaler := getattr(engine, "scaler", None)) is not None:
        scaled: Tensor = scaler.scale(torch.ones_like(loss, requires_grad=False))
        return scaled
    # Only Megatron's engines store the number of micro-batches in a micro-batch.
    if "num_micro_batch" not in data.keys():
        return 1.0
    if engine is None or getattr(engine.engine_config, "dynamic_context_parallel", False):
        return None
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    if (routed := tu.get_non_tensor_data(data, "routed_num_tokens", None)) is not None:
        scale = float(routed) / float(tu.get_non_tensor_data(data, "dp_size", 1))
    else:
        scale = float(parallel_state.get_context_parallel_world_size())
    grad_scale = get_model_config(engine.module[0]).grad_scale_func
    return scale if grad_scale is None else scale * grad_scale(torch.ones_like(loss, requires_grad=False))


_FATAL = (
    "log-probs of the current policy (its weights or its forward pass have diverged)",
    "advantages (a reward or its normalisation is broken)",
)


class OffPolicyLoss:
    """verl's ``ppo_loss`` with a correction in its policy term.

    Args:
        spec: the correction; if no part is configured, loss and gradient are bitwise identical to verl's.
        actor_config: verl's ActorConfig, the first argument of ``ppo_loss``.
        prove: True to prove every micro-batch, not only those that the trainer's plan marks.
        shadows: name -> correction that is reported without being applied.
        record: what to record if the trainer's plan requests it.
        moving: parts whose bounds are sent in the trainer's plan with each update, and the sides that move.
        base_loss: called with (config, model_output, data, dp_group).
        extensions: section -> worker extension, which adds terms to the loss and reports on each micro-batch; called in
            order.

    Attributes:
        spec: the correction, with the bounds of the latest update.
        fingerprint: fingerprint of the parts that do not move.
        verl_loss: the base loss as verl runs it.
        base_loss: the base loss with the KL term that the correction configures.
        extensions: the argument.
        ledger: packets of this process that have not been sent; if None, packets contain no reports.
        takes_padded: True if the base loss accepts the result of ``MicroBatch.padded_output``.
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
        extensions: Mapping[str, WorkerExtension] | None = None,
    ) -> None:
        self.spec = spec
        self.prove = prove
        self.shadows = dict(shadows or {})
        self.record = record
        self.moving = dict(moving or {})
        self.fingerprint = compute_fingerprint(spec, self.moving)
        self.ledger: Ledger | None = Ledger()
        self.takes_padded = base_loss is ppo_loss
        self.verl_loss: BoundLoss = partial(base_loss, actor_config)
        self.base_loss: BoundLoss = self.verl_loss
        has_kl = spec.support is None or bool(actor_config.use_kl_loss)
        if (surrogate := choose_surrogate(spec, has_kl=has_kl)) is not None:
            self.base_loss = replace_kl(base_loss, actor_config, surrogate)
        self.extensions: Mapping[str, WorkerExtension] = extensions or {}
        self.actor_config = actor_config

    def extended(self, base_loss: BoundLoss) -> BoundLoss:
        """Add the terms of all extensions to ``base_loss``."""
        for extension in self.extensions.values():
            base_loss = extension.wrap_loss(base_loss, self.actor_config)
        return base_loss

    def __call__(
        self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the engine's loss: (scalar loss, metrics); the metrics contain a packet under ``METRIC_KEY``.

        Raises:
            FloatingPointError: a log-prob of the current policy or an advantage is not finite; raised before the
                backward pass.
        """
        if self.spec.is_none and mb.WITHHELD not in model_output:
            loss, metrics = self.extended(self.base_loss)(model_output, data, dp_group)
            packet = self.measure_uncorrected(model_output, data)
            self.report(packet, model_output, data)
            return loss, {**metrics, METRIC_KEY: packet}
        return add_parts([self._correct(*part, dp_group) for part in split_micro_batch(model_output, data)])

    def _correct(
        self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        check_ranks(data, dp_group)
        batch = mb.read(model_output, data)
        if self.moving and (sent := mb.read_bounds(batch, self.moving)) != read_bounds(self.spec, self.moving):
            self.spec = replace_bounds(self.spec, sent)
        packet = self.create_packet(batch)
        likeliest = None if self.spec.centering is None else LikeliestTokens.of(batch)
        random_state = torch.get_rng_state()
        loss, metrics, packet.statistics = self.compute_corrected(batch, dp_group, likeliest)
        if self.ledger is not None and torch.is_grad_enabled():
            if likeliest is not None:
                packet.note("statistics", defer_statistics(measure_drift(self.spec, self.shadows, batch, likeliest)))
            packet.note("shares", defer_shares(batch.response_mask, data))
        if self.proves(batch):
            packet.proof = prove(self.copy_for_trials(random_state), batch, loss)
        packet.watch(loss, expected_scale(loss, data))
        self.report(packet, model_output, data)
        return loss, {**metrics, METRIC_KEY: packet}

    def proves(self, batch: mb.MicroBatch) -> bool:
        """Return True if this micro-batch must be proved."""
        return bool(self.prove or batch.marks) and batch.log_prob.requires_grad and not self.spec.is_none

    def report(self, packet: Packet, model_output: Mapping[str, Any], data: TensorDict) -> None:
        """Add the reports of extensions to ``packet``."""
        if self.extensions and self.ledger is not None:
            weigh = None if self.spec.is_none else partial(self._weigh, model_output, data)
            with torch.no_grad():
                rows = LossRows(model_output, data, with_padding=False, weigh=weigh, actor_config=self.actor_config)
                packet.reports = {section: each.report(rows) for section, each in self.extensions.items()}

    def _weigh(self, model_output: Mapping[str, Any], data: TensorDict) -> Tensor:
        """Recompute the correction's factor for reports that read it."""
        batch = mb.read(model_output, data)
        return mb.compute_factor(self.spec, batch, mb.decide(self.spec, batch, measure="nothing"))

    def create_packet(self, batch: mb.MicroBatch) -> Packet:
        """Create this micro-batch's metrics packet, whose values are filled in when the packet is sent."""
        packet = Packet(
            self.fingerprint,
            bounds=read_bounds(self.spec, self.moving),
            plan=0 if batch.plan is None else batch.plan.fingerprint(),
        )
        if self.ledger is not None:
            trained = torch.is_grad_enabled() and not self.spec.is_none
            observation = Observation(batch.detached(), self.spec, self.shadows, self.moving, trained)
            worker_seams.complete_sent_metrics()
            self.ledger.enter(packet, observation, more=not batch.last)
        return packet

    def measure_uncorrected(self, model_output: Mapping[str, Any], data: TensorDict) -> Packet:
        """Measure a micro-batch under ``correction=none``; the returned packet has statistics if the batch has mu."""
        if mb.ROLLOUT_LOG_PROBS not in data.keys():
            return Packet(self.fingerprint)
        batch = mb.read(model_output, data)
        packet = self.create_packet(batch)
        if self.record is not None:
            packet.statistics = self._recorded(batch, mb.decide(self.spec, batch, measure="nothing"))
        return packet

    def compute_corrected(
        self, batch: mb.MicroBatch, dp_group: Any = None, likeliest: LikeliestTokens | None = None
    ) -> tuple[Tensor, dict[str, Any], dict[str, Statistic]]:
        """Compute verl's loss with the correction: (scalar loss, verl's metrics, the recorder's statistics).

        Args:
            likeliest: likeliest tokens of the batch, for score centering; None: they are read if needed.
        """
        if mb.WEIGHTS in batch.data.keys():
            raise ValueError(
                f"the micro-batch already contains {mb.WEIGHTS}, because both verl's algorithm.rollout_correction and "
                "correction are on. Set algorithm.rollout_correction.rollout_is=null, or correction=none."
            )
        step = mb.decide(self.spec, batch, measure="nothing")
        # This is a micro-batch's only device-to-host transfer; it fetches the checks that must pass before the backward
        # pass.
        fetch(self._guards(batch))
        statistics = self._recorded(batch, step)
        model_output = batch.padded_output() if self.takes_padded else batch.model_output
        handed = self.hand_over(batch, step)
        loss, metrics = self.extended(self.base_loss)(model_output, handed, dp_group)
        if self.spec.penalty is not None:
            squares = compute_penalty(self.spec.penalty, batch, self.spec)
            mean = mini_batch_mean(squares, batch.response_mask, self.actor_config, batch.data)
            loss = loss + self.spec.penalty.coefficient * mean
        if self.spec.centering is not None:
            term = compute_centering_term(self.spec, batch, step, likeliest or LikeliestTokens.of(batch))
            loss = loss + mini_batch_mean(term, batch.response_mask, self.actor_config, batch.data)
        return loss, metrics, statistics

    def _recorded(self, batch: mb.MicroBatch, step: StepStage) -> dict[str, Statistic]:
        if self.record is None:
            return {}
        columns = [name for extension in self.extensions.values() for name in extension.columns]
        if mb.SUPPORT_SIZE in batch.model_output:
            columns.append(mb.SUPPORT_SIZE)
        return record(self.record, self.spec, batch, step, columns)

    def copy_for_trials(self, random_state: Tensor) -> OffPolicyLoss:
        """Copy the loss for trial calls, whose packets are not sent.

        Args:
            random_state: state of the CPU's random generator before the loss under test ran; needed because clip_cov
                chooses at random which tokens to clip.
        """
        # Without a ledger, a trial reports nothing.
        trial = copy.copy(self)
        trial.ledger = None
        trial.base_loss, trial.verl_loss = (
            partial(_repeat, random_state, each) for each in (self.base_loss, self.verl_loss)
        )
        return trial

    def hand_over(self, batch: mb.MicroBatch, step: StepStage) -> TensorDict:
        """Build verl's micro-batch with weight * keep and pi_old, (B, T) each; pi replaces non-finite pi_old."""
        old = mb.choose_pi_old(self.spec, batch)
        old_log_prob = torch.where(torch.isfinite(old), old, batch.log_prob.detach().to(old.dtype))
        handed: dict[str, Any] = {
            mb.WEIGHTS: mb.compute_factor(self.spec, batch, step),
            "old_log_probs": old_log_prob,
            mb.PI_OLD: old,
        }
        if batch.data["advantages"].is_nested:
            # These columns are padded here, because padding in verl's loss is slower.
            handed |= {"response_mask": batch.response_mask, "advantages": batch.advantages}
        return batch.data_with(**handed)

    def _guards(self, batch: mb.MicroBatch) -> list[DeferredValue[None]]:
        guards = [_check_finite(batch), *filter(None, [batch.counted])]
        if self.ledger is not None and (seals := mb.check_seals(batch)) is not None:
            guards += [seals, mb.check_engine(batch)]
        if self.spec.proximal != "recompute" and torch.is_grad_enabled():
            guards.append(find_zero_rows(batch.rollout_log_prob, batch.log_prob.detach(), batch.response_mask))
        return guards


def add_parts(found: Sequence[tuple[Tensor, dict[str, Any]]]) -> tuple[Tensor, dict[str, Any]]:
    """Add the losses of a micro-batch's parts, and merge their metrics."""
    if len(found) == 1:
        return found[0]
    losses, metrics = zip(*found, strict=True)
    return torch.stack(losses).sum(), merge_metrics(metrics)


def _repeat(random_state: Tensor, loss: BoundLoss, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random_state)
        return loss(*args, **kwargs)


def _check_finite(batch: mb.MicroBatch) -> DeferredValue[None]:
    lost = [~torch.isfinite(t.detach()) & batch.response_mask for t in (batch.log_prob, batch.advantages)]

    def judge(counts: list[int]) -> None:
        for bad, what in zip(counts, _FATAL, strict=True):
            if bad:
                raise FloatingPointError(
                    f"{bad} {what} are not finite, and no mask can remove them from the gradient. "
                    f"The optimizer has not stepped."
                )

    return DeferredValue(torch.stack(lost).sum((1, 2)), judge)


def build_loss(
    config: DictConfig,
    spec: CorrectionSpec,
    shadows: Mapping[str, CorrectionSpec],
    *,
    moving: Mapping[str, Side] | None = None,
    extensions: Mapping[str, WorkerExtension] | None = None,
) -> OffPolicyLoss:
    """Build the loss of a run, which is then sent to the workers of the engine path."""
    actor_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    record = RecordSettings.from_config(config)
    return OffPolicyLoss(spec, actor_config, shadows=shadows, record=record, moving=moving, extensions=extensions)
