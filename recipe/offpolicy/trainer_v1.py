"""verl's V1 trainer with a correction: hands the loss to the workers and stops the run unless it is proved live.

Seams in verl 0.9.1, all public hooks of ``verl.trainer.ppo.v1.trainer_base.PPOTrainer``:
``on_init_end(self)``, ``_compute_old_log_prob(self, batch, metrics)``, ``_compute_advantage(self, batch, metrics)``,
``_update_actor(self, batch, metrics)``, and ``RayWorkerGroup.set_loss_fn(loss_fn)`` /
``RayWorkerGroup.update_actor(batch)`` of the actor's worker group. Columns are read and written by TransferQueue's
``kv_batch_get(keys, partition_id, select_fields)`` and ``kv_batch_put(keys, partition_id, fields)``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass

from .baseline import regroup
from .batch_plan import COLUMNS, PLAN, Dealing, SharedPlan, constants_of, kept, row_columns
from .checks import TRAINER_MODES, shadows_of, spec_of
from .correction import CorrectionSpec
from .correction.proximal import WITHOUT_FORWARD
from .correction.statistics import merge_all
from .liveness import LivenessError, verify, verify_fingerprint
from .micro_batch import ROLLOUT_LOG_PROBS, sampled_checksums
from .packet import take_packets
from .proof import each_alone
from .worker_loss import OffPolicyLoss

if TYPE_CHECKING:
    from verl.trainer.ppo.v1 import PPOTrainer

# Below verl's logger, so that it speaks wherever verl does; other names are silent in Ray's actors.
logger = logging.getLogger("verl.offpolicy")

_COARSE = (
    "log-probs reach the loss in 16 bits: rounding of up to 0.03 nats a token looks like mismatch, and narrow bands "
    "reject by it. Let the trainer compute log-probs in float32."
)


class OffPolicyTrainer:
    """Mixed into one of verl's V1 trainers by ``with_correction``."""

    config: DictConfig
    actor_rollout_wg: Any
    global_steps: int

    def on_init_end(self) -> None:
        self.correction = spec_of(self.config)
        self.shadows = shadows_of(self.config)
        self._proving = True
        self._sampled_rows: list[int] = []
        self._live: dict[str, float] = {}
        self._statistics: dict[str, float] = {}
        self._hand_over_loss()
        self.actor_rollout_wg.update_actor = partial(self._update_and_collect, self.actor_rollout_wg.update_actor)
        super().on_init_end()  # type: ignore[misc]

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        # The first time that the trainer sees the rollout's log-probs, before anything can touch them.
        if self._proving and not self.correction.is_none:
            self._sampled_rows = sampled_checksums(_columns(batch, "responses", "response_mask", ROLLOUT_LOG_PROBS))
        if self.correction.proximal in WITHOUT_FORWARD:
            # What the loss takes for pi_old is decided there; until then mu stands in its place.
            mu = _columns(batch, ROLLOUT_LOG_PROBS)[ROLLOUT_LOG_PROBS]
            return _put(batch, old_log_probs=mu)
        return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.correction.baseline == "include":
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        rows = _columns(batch, *COLUMNS, "uid")
        uids = [str(uid) for uid in rows["uid"]]
        mask, keep = kept(self.correction, rows)
        rejected = mask.any(-1) & ~keep.any(-1)
        regrouped, silent = regroup(uids, rejected)
        batch = super()._compute_advantage(_put(batch, uid=NonTensorStack(*regrouped)), metrics)  # type: ignore[misc]
        results = _columns(batch, "advantages", "returns")
        silenced = {name: _zero_rows(results[name], silent) for name in ("advantages", "returns")}
        metrics["offpolicy/baseline/excluded_sequences"] = float(rejected.sum())
        metrics["offpolicy/baseline/silent_sequences"] = float(sum(silent))
        return _put(batch, uid=NonTensorStack(*uids), **silenced)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self._statistics = {}
        batch = super()._update_actor(self._with_plan(batch), metrics)  # type: ignore[misc]
        if not self._statistics:
            raise LivenessError("the update went past the correction: nothing was collected from the workers.")
        metrics.update({f"offpolicy/{name}": value for name, value in self._statistics.items()})
        return batch

    def _with_plan(self, batch: Any) -> Any:
        """The batch with what its workers have to know of the whole of it."""
        spec = self.correction
        plan = SharedPlan(step=self.global_steps)
        if spec.needs_constants or spec.denominator == "kept" or any(s.needs_constants for s in self.shadows.values()):
            rows = _columns(batch, *COLUMNS)
            plan = replace(
                plan,
                constants=constants_of(spec, rows),
                shadow_constants={name: constants_of(shadow, rows) for name, shadow in self.shadows.items()},
            )
            if spec.denominator == "kept":
                batch = _put(batch, **row_columns(spec, rows, self._dealing()))
        batch.extra_info[PLAN] = plan
        return batch

    def _dealing(self) -> Dealing:
        actor = self.config.actor_rollout_ref.actor
        return Dealing(
            # verl's trainer has filled this in when it balanced the batch.
            ranks=max(self.actor_rollout_wg._dispatch_info["actor"]) + 1,
            mini_batch_rows=actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n,
            loss_agg_mode=actor.loss_agg_mode,
        )

    def _hand_over_loss(self) -> None:
        actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(
            OffPolicyLoss(self.correction, actor_config, prove=self._proving, shadows=self.shadows)
        )

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        """``actor_rollout_wg.update_actor``, with the packets taken out of its metrics and judged."""
        output = update(batch)
        packets = take_packets(output["metrics"])
        if self._proving:
            self._live = verify(
                packets,
                self.correction,
                sampled_rows=self._sampled_rows,
                epochs=self.config.actor_rollout_ref.actor.ppo_epochs,
                allow_identical=self.config.offpolicy.allow_identical_log_probs,
            )
            if self.correction.is_none or self._live["proved"]:
                self._proving = False
                self._hand_over_loss()
                logger.info(_sentence(self.correction, self._live))
                if self._live.get("log_prob_bits", 32) < 32:
                    logger.warning(_COARSE)
            else:
                logger.warning("the correction is not proved yet: this update had no gradient to see it in.")
        else:
            verify_fingerprint(packets, self.correction)
        merged = merge_all(packet.statistics for packet in packets)
        self._statistics = {name: statistic.value() for name, statistic in merged.items()}
        self._statistics |= {f"live/{name}": value for name, value in self._live.items()}
        return output


def with_correction(trainer: type[PPOTrainer]) -> type[PPOTrainer]:
    """A subclass of verl's trainer that hands over the loss and verifies it."""
    return type(f"OffPolicy{trainer.__name__}", (OffPolicyTrainer, trainer), {})


def install_trainers() -> None:
    """Put the corrected trainers under verl's own mode names, in this process; idempotent.

    verl chooses buffers by the name of the mode, and takes any name but ``sync`` for asynchronous, so a mode of
    our own would change the training.
    """
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls

    for mode in TRAINER_MODES:
        trainer = get_trainer_cls(mode)
        if not issubclass(trainer, OffPolicyTrainer):
            TRAINER_REGISTRY[mode] = with_correction(trainer)


def _columns(batch: Any, *names: str) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def _put(batch: Any, **columns: Any) -> Any:
    fields = TensorDict(columns, batch_size=len(batch.keys))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _zero_rows(nested: Tensor, silent: list[bool]) -> Tensor:
    rows = [row * (not quiet) for row, quiet in zip(nested.unbind(), silent, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _sentence(spec: CorrectionSpec, live: dict[str, float]) -> str:
    if spec.is_none:
        return "no correction is configured; statistics only."
    parts = [name for name, _ in each_alone(spec)]
    names = ", ".join(name for name in parts if name != "proximal" or len(parts) == live["parts"])
    return (
        f"{names} LIVE in the gradient of {live['gradient_tokens']:.0f} tokens (error {live['gradient_error']:.1e}), "
        f"mu of {live['rows']:.0f} rows as sampled, fingerprint {live['fingerprint']:.0f}."
    )
