"""Mixin of the V1 trainer that keeps the weights of the latest updates, and says which of them rows were sampled by.

Seams in verl 0.9.1: ``PPOTrainer._init_resource_pool_mgr(self)``, whose ``role_worker_mapping`` names the actor's
worker, and ``save_model_to_cpu(n)``, ``restore_model_from_cpu(n)`` and ``clear_cpu_model(n)`` of ``DetachActorWorker``,
which verl's own separate_async mode uses alike.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ray
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role

from verl_patches import engine_loss, trainer_v1

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..monitor.mismatch.late_weights import find_lag
from ..monitor.mismatch.snapshot_settings import SnapshotSettings

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from .batch_view_v1 import TransferQueueBatch

logger = logging.getLogger("verl.offpolicy")

_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


class SnapshotTrainer:
    """Mixin that is put before ``OffPolicyTrainer``, or one that stands on it."""

    config: DictConfig
    global_steps: int
    role_worker_mapping: dict[Any, Any]
    actor_rollout_wg: Any

    def _init_resource_pool_mgr(self) -> None:
        engine_loss.check(trainer_v1.SEAMS_OF_SNAPSHOTS)
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        for role in _ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(DetachActorWorker)

    @cached_property
    def _settings(self) -> SnapshotSettings:
        settings = SnapshotSettings.from_config(self.config)
        assert settings is not None
        return settings

    @cached_property
    def _kept(self) -> deque[str]:
        """Names of the weights that are kept, the present ones last."""
        return deque()

    @cached_property
    def _told(self) -> list[int]:
        """Lags that the log has told."""
        return []

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        metrics.update(self._find_lag(self._view(batch)))  # type: ignore[attr-defined]
        return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]

    def _find_lag(self, view: TransferQueueBatch) -> dict[str, float]:
        """Score a few rows under the weights of each update that is kept; return metrics.

        An update's weights are kept under its step's name, whatever names verl's separate_async uses beside them.
        """
        workers, kept = self.actor_rollout_wg, self._kept
        kept.append(f"offpolicy-{self.global_steps}")
        workers.save_model_to_cpu(kept[-1])
        if len(kept) > self._settings.snapshots + 1:
            workers.clear_cpu_model(kept.popleft())
        rows = view.token_ids[: self._settings.rows]
        columns = view.rows("response_mask", ROLLOUT_LOG_PROBS)
        mask, mu = (columns[name][: len(rows)] for name in ("response_mask", ROLLOUT_LOG_PROBS))
        apart = []
        try:
            for name in reversed(kept):
                workers.restore_model_from_cpu(name)
                own = view.compute_log_probs(rows)
                gaps = [
                    abs(value - float(mu[row, place]))
                    for row, values in enumerate(own)
                    for place, value in enumerate(values)
                    if mask[row, place]
                ]
                apart.append(sum(gaps) / len(gaps) if gaps else float("nan"))
        finally:
            workers.restore_model_from_cpu(kept[-1])
        lag = find_lag(apart)
        if lag and lag not in self._told:
            self._told.append(lag)
            logger.warning(
                "the rollout engine's weights lag by %d update%s: mu of %d rows is %.2g nats a token from the weights "
                "of then, and %.2g from the present ones. verl's versions do not see it: they count what was sent.",
                *(lag, "" if lag == 1 else "s", len(rows), apart[lag], apart[0]),
            )
        known = float("nan") if lag is None else float(lag)
        return {"offpolicy/late_weights/lag": known, "offpolicy/late_weights/apart": apart[0]}
