"""verl's V1 trainers with routing replay on FSDP: workers that replay, a client that notes routes, and the proof.

Seams in verl 0.9.1: ``_init_resource_pool_mgr(self)`` of ``verl.trainer.ppo.v1.trainer_base.PPOTrainer``, which maps
roles to workers, and those of ``trainer_v1``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.utils import Role
from verl.workers.utils.padding import response_from_nested

from ..recording.schema import WITHOUT_REPLAY
from ..replay.batch_routes import REPLAY_STEP
from ..replay.client import note_routes
from ..replay.fsdp_engine import REPORT
from ..replay.replay_settings import ReplaySettings
from ..replay.tally import RoutingReport
from ..replay.verdict import judge, measure_routes, take_reports
from ..replay.worker import build_replaying
from .batch_view_v1 import put_columns, read_columns
from .own_forward import Pair
from .trainer_v1 import FORWARD, OffPolicyTrainer

logger = logging.getLogger("verl.offpolicy")

ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)
"""Roles whose worker trains."""


class ReplayingTrainer(OffPolicyTrainer):
    """Mixin of verl's V1 trainers in front of ``OffPolicyTrainer`` or a subclass of it."""

    role_worker_mapping: dict[Role, Any]
    _reports: Sequence[RoutingReport] = ()
    """Of the running step's updates."""

    @property
    def _replay(self) -> ReplaySettings:
        settings = ReplaySettings.from_config(self.config)
        assert settings is not None, "a run without replay has the trainer without it"
        return settings

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self._reports = ()
        batch = super().step(metrics, timing_raw)
        # Of all the step's updates: verl would average shares of which one update has none.
        routing: dict[str, float] = measure_routes(self._reports) if self._reports else {}
        metrics.update({f"offpolicy/routing/{name}": value for name, value in routing.items()})
        return batch

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        workers = self.role_worker_mapping
        for role in (role for role in ACTORS if role in workers):
            workers[role] = ray.remote(build_replaying(workers[role].__ray_actor_class__, self._replay))

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()
        return note_routes(client) if self._replay.mode == "R3" else client

    def _compute_log_probs(self, batch: Any, rows: Sequence[Pair]) -> list[list[float]]:
        # Rows of an extension's making were not sampled by any route.
        step = batch.extra_info.pop(REPLAY_STEP, None)
        try:
            return super()._compute_log_probs(batch, rows)
        finally:
            if step is not None:
                batch.extra_info[REPLAY_STEP] = step

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self._records_without_replay:
            batch = self._put_native(batch)
        batch.extra_info[REPLAY_STEP] = self.global_steps
        return super()._compute_old_log_prob(batch, metrics)

    @property
    def _records_without_replay(self) -> bool:
        settings = self.recording.settings
        return settings is not None and settings.without_replay and settings.records(self.global_steps)

    def _put_native(self, batch: Any) -> Any:
        """Put log pi_old by the trainer's own routes beside the batch, by a forward pass that replays nothing."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        batch.extra_info.update(FORWARD | {"temperature": temperature})
        self.actor_rollout_wg.compute_log_prob(batch)
        found = read_columns(batch, "log_probs", "response_mask")
        native = response_from_nested(found["log_probs"], found["response_mask"])
        columns = {WITHOUT_REPLAY: native.float()}
        self.cost.add_columns(columns)
        return put_columns(batch, **columns)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info[REPLAY_STEP] = self.global_steps
        return super()._update_actor(batch, metrics)

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        tokens = sum(tag["prompt_len"] + tag["response_len"] for tag in batch.tags)
        tokens *= self.config.actor_rollout_ref.actor.ppo_epochs
        output = super()._update_and_collect(update, batch)
        reports = take_reports(output["metrics"], REPORT)
        if proof := judge(reports, self._replay.mode, tokens=tokens):
            logger.info(proof)
        self._reports = (*self._reports, *reports)
        return output
