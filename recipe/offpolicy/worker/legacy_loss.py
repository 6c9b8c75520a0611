"""Runs the engine path's loss in verl's legacy actors, which compute their loss with three functions of ``core_algos``.

A ``Handover`` sends the correction to the actor. A legacy actor obtains a policy loss from ``core_algos``, aggregates
entropy and KL itself, and multiplies the sum by the micro-batch's share of the mini-batch. Its denominators are
therefore those of the micro-batch. A ``LegacyUpdate`` replaces these three functions during one update. The policy term
then comes from the code of the engine path, and every denominator is that of the mini-batch over all ranks. To cancel
the actor's multiplication by its share, the loss is divided by this share first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss
from verl_patches import worker_seams
from verl_patches.legacy.handover import MINI_ROWS, MINI_TOKENS, PREFIX

from ..batch import micro_batch as mb
from ..batch.padding import split_micro_batch, with_tensors
from ..batch.plan import PLAN, SharedPlan
from ..correction import CorrectionSpec, StepStage
from ..correction.spec import Side, replace_bounds
from ..extensions.add_on import WorkerExtension
from ..proof.gradient import prove
from ..recording.run import RecordSettings
from .loss import OffPolicyLoss, add_parts
from .metrics import METRIC_KEY
from .terms import BoundLoss, choose_surrogate


@dataclass(frozen=True)
class Handover:
    """The correction and the constants of one batch, which are sent to a legacy actor in the batch's ``meta_info``.

    Implements ``verl_patches.legacy.handover.LegacyHandover``.

    Attributes:
        spec: the correction.
        plan: the trainer's constants for the whole batch.
        prove: True to prove every micro-batch, not only those that the plan marks.
        shadows: name -> correction that is reported without being applied.
        record: what to record.
        moving: parts whose bounds are sent with the plan, and the sides that move.
        extensions: section -> the extension's worker part.
    """

    spec: CorrectionSpec
    plan: SharedPlan
    prove: bool = False
    shadows: Mapping[str, CorrectionSpec] = field(default_factory=dict)
    record: RecordSettings | None = None
    moving: Mapping[str, Side] = field(default_factory=dict)
    extensions: Mapping[str, WorkerExtension] = field(default_factory=dict)

    @property
    def reads_rollout_log_probs(self) -> bool:
        """True if the actor trains with this package's loss instead of verl's."""
        return not self.spec.is_none or bool(self.extensions)

    def update(self, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> LegacyUpdate:
        return LegacyUpdate(self, actor_config, dp_size=dp_size, upstream=upstream)


_ROWS = (
    "responses",
    "response_mask",
    "old_log_probs",
    "advantages",
    "ref_log_prob",
    "input_ids",
    "attention_mask",
    "position_ids",
    mb.ROLLOUT_LOG_PROBS,
    mb.WEIGHTS,
)
_PG_LOSS = "actor/pg_loss"  # the actor sums this metric itself


def _padded_ppo_loss(
    config: Any, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    """Call verl's ``ppo_loss`` on (B, T) log-probs of the responses, after conversion to verl's layout."""
    log_probs = model_output["log_probs"]
    rows, width = log_probs.shape
    # With a prompt of one token, a row's log-probs are the response's log-probs, shifted left by one.
    flat = torch.nn.functional.pad(log_probs, (0, 1)).flatten()
    data = with_tensors(
        data,
        prompts=torch.ones(rows, 1, dtype=torch.int64),
        attention_mask=torch.ones(rows, width + 1, dtype=torch.int64),
    )
    # In a mini-batch without tokens, every sum is 0, and so is the loss.
    tu.assign_non_tensor(data, batch_num_tokens=max(data["batch_num_tokens"], 1))
    return ppo_loss(config, {**model_output, "log_probs": flat}, data, dp_group)


class LegacyLoss(OffPolicyLoss):
    """The engine's loss on padded log-probs; the proof compares the actor's gradient with those of its terms.

    Args:
        settings: the correction, and what to report.
        actor_config: verl's ActorConfig; not modified.

    Attributes:
        policy: the policy term alone, for actors that add the KL term themselves.
        old_log_prob, rollout_log_prob: (B, T) pi_old and mu of the last micro-batch.
    """

    policy: LegacyLoss
    old_log_prob: Tensor
    rollout_log_prob: Tensor

    def __init__(self, settings: Handover, actor_config: Any) -> None:
        # verl's loss stores a mini-batch's numbers in its config; the actor must not read these numbers later.
        config = replace(actor_config, global_batch_info={})
        super().__init__(
            replace_bounds(settings.spec, settings.plan.bounds),
            config,
            prove=settings.prove,
            shadows=settings.shadows,
            record=settings.record,
            moving=settings.moving,
            base_loss=_padded_ppo_loss,
            extensions=settings.extensions,
        )
        # The actor computes the policy and KL terms separately; the copy computes only the policy term.
        self.policy = copy.copy(self)
        alone: BoundLoss = partial(_padded_ppo_loss, replace(config, use_kl_loss=False, global_batch_info={}))
        self.policy.base_loss = self.policy.verl_loss = alone

    def hand_over(self, batch: mb.MicroBatch, step: StepStage) -> TensorDict:
        handed = super().hand_over(batch, step)
        self.old_log_prob, self.rollout_log_prob = handed[mb.PI_OLD], batch.rollout_log_prob
        return handed


@dataclass
class _Running:
    """Micro-batch whose loss the actor is computing."""

    rows: Mapping[str, Any]
    scale: float
    tokens: int
    global_rows: int


class LegacyUpdate:
    """One update of a legacy actor under a handover: replaces its calls into ``core_algos``.

    With ``correction=none`` and without extensions, the results are bitwise identical to verl's.

    Args:
        settings: the settings that the trainer sent with the batch.
        actor_config: the actor's own ActorConfig (verl's class).
        dp_size: number of data-parallel ranks over which the actor averages gradients.
        upstream: function that returns the gradient with which the actor starts its backward pass; called for each
            micro-batch.
    """

    def __init__(self, settings: Handover, actor_config: Any, *, dp_size: int, upstream: Callable[[], float]) -> None:
        self.settings = settings
        self.spec = settings.spec
        self.loss = LegacyLoss(settings, actor_config)
        self.config = actor_config
        self.dp_size = dp_size
        self.upstream = upstream
        self._micro: _Running | None = None

    def begin(self, rows: Mapping[str, Any], *, scale: float) -> None:
        """Start a micro-batch, before its loss is computed.

        Args:
            rows: verl's micro-batch: padded (B, T) tensors, the columns of ``mini_batch_columns``, and all other
                columns whose names begin with ``PREFIX``.
            scale: factor by which the actor multiplies the micro-batch's loss.

        Raises:
            ValueError: the rows belong to several mini-batches.
        """
        numbers = torch.stack([rows[MINI_TOKENS], rows[MINI_ROWS]], dim=-1).unique(dim=0)
        if len(numbers) != 1:
            raise ValueError(
                f"a micro-batch contains rows of several mini-batches, with (tokens, rows) {numbers.tolist()}."
            )
        tokens, global_rows = numbers[0].tolist()
        self._micro = _Running(rows, scale, tokens, global_rows)

    def end(self, metrics: Mapping[str, Any]) -> None:
        """Complete the update's packets before the actor's metrics are sent to the trainer."""
        worker_seams.complete(metrics)

    @property
    def micro(self) -> _Running:
        if self._micro is None:
            raise RuntimeError("verl's actor computed a loss before the forward pass of a micro-batch.")
        return self._micro

    def get_policy_loss_fn(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a policy loss with the correction, to replace verl's function called ``name``."""
        if not self.settings.reads_rollout_log_probs:
            return partial(self._uncorrected, original(name))
        return self._corrected

    def agg_loss(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Replace verl's ``agg_loss``, using the denominators of the mini-batch over all ranks."""
        if not self.settings.reads_rollout_log_probs:
            return original(*args, **kwargs)
        loss: Tensor = original(
            *args,
            **kwargs,
            dp_size=self.dp_size,
            batch_num_tokens=max(self.micro.tokens, 1),
            global_batch_size=self.micro.global_rows,
            loss_scale_factor=self.config.loss_scale_factor,
        )
        return loss / self.micro.scale

    def kl_penalty(
        self, original: Callable[..., Tensor], logprob: Tensor, ref_logprob: Tensor, kl_penalty: str
    ) -> Tensor:
        """Compute verl's ``kl_penalty``, (B, T), with the gradient of the corrected term if one is configured."""
        penalty = original(logprob, ref_logprob, kl_penalty)
        if (surrogate := choose_surrogate(self.spec)) is None:
            return penalty
        policy = self.loss.policy
        term = surrogate(logprob, policy.old_log_prob, policy.rollout_log_prob, ref_logprob, kl_penalty)
        return term - term.detach() + penalty.detach()

    def _uncorrected(self, policy_loss: Callable[..., Any], **call: Any) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = policy_loss(**call)
        packet = self.loss.measure_uncorrected({"log_probs": call["log_prob"]}, self._data())
        return loss, {**metrics, METRIC_KEY: packet}

    def _corrected(self, *, log_prob: Tensor, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        """Compute the mini-batch mean of the policy term, divided by the factor that the actor applies next.

        The actor's other arguments are ignored, because pi_old and the mask come from the batch.
        """
        whole = ({"log_probs": log_prob}, self._data())
        # The KL surrogate reads the log-probs of the whole micro-batch.
        parts = [whole] if choose_surrogate(self.spec) else split_micro_batch(*whole)
        loss, metrics = add_parts([self._correct(*part) for part in parts])
        packets = {METRIC_KEY: metrics.pop(METRIC_KEY)}
        plain = {key: _plain(value) for key, value in metrics.items() if key != _PG_LOSS}
        return loss / self.micro.scale, plain | packets

    def _correct(self, model_output: Mapping[str, Any], data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        batch = mb.read(model_output, data)
        packet = self.loss.create_packet(batch)
        random_state = torch.get_rng_state()
        loss, metrics, packet.statistics = self.loss.policy.compute_corrected(batch)
        self.loss.report(packet, batch.model_output, batch.data)
        if self.loss.proves(batch):
            packet.proof = prove(self.loss.copy_for_trials(random_state), batch, loss)
        # The loss is divided by the factor by which the actor multiplies it next.
        packet.watch(loss, self.upstream())
        return loss, {**metrics, METRIC_KEY: packet}

    def _data(self) -> TensorDict:
        """Build the micro-batch in the form in which the engine passes it to its loss."""
        rows = self.micro.rows
        columns = {key: rows[key] for key in rows.keys() if key in _ROWS or key.startswith(PREFIX)}
        data = TensorDict(columns, batch_size=len(rows["responses"]))
        tu.assign_non_tensor(
            data,
            dp_size=self.dp_size,
            batch_num_tokens=self.micro.tokens,
            global_batch_size=self.micro.global_rows,
            **{PLAN: self.settings.plan},
        )
        return data


def _plain(value: Any) -> Any:
    """Convert a metric to a number, as legacy actors report it."""
    return value.aggregate() if isinstance(value, Metric) else value
