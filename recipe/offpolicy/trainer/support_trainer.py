"""verl's trainers with the support of truncated sampling: servers, client, workers that replay it, and the proof.

Seams in verl 0.9.1: ``_init_resource_pool_mgr(self)`` and ``get_llm_client(self)`` of
``verl.trainer.ppo.v1.trainer_base.PPOTrainer``, which map roles to workers and give the client of the rollout servers;
``init_workers(self)`` of ``RayPPOTrainer`` and its attribute ``llm_server_manager``, which do so in V0; and those of
``trainer_v1`` and ``trainer_v0``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import ray
from verl import DataProto
from verl.trainer.ppo.utils import Role

from verl_patches import engine_loss, truncated_sampling

from ..support.client import note_supports
from ..support.fsdp_engine import FLAG, REPORT
from ..support.support_server import serve_supports
from ..support.support_settings import SupportSettings
from ..support.support_verdict import judge, take_reports
from ..support.worker import build_supporting
from .own_forward import Pair

logger = logging.getLogger("verl.offpolicy")

_ACTORS = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef)


class SupportTrainer:
    """What both trainers have in common."""

    config: Any
    role_worker_mapping: dict[Role, Any]
    _support_metrics: Mapping[str, float] = MappingProxyType({})
    _support_proved = False

    @cached_property
    def _support(self) -> SupportSettings:
        settings = SupportSettings.from_config(self.config)
        assert settings is not None, "a run without it has the trainer without it"
        return settings

    def _install_support(self) -> None:
        """Put workers and servers that replay the support in the place of verl's."""
        engine_loss.check(truncated_sampling.SEAMS)
        serve_supports(self._support)
        workers = self.role_worker_mapping
        for role in (role for role in _ACTORS if role in workers):
            workers[role] = ray.remote(build_supporting(workers[role].__ray_actor_class__, self._support))

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        output = super()._update_and_collect(update, batch)  # type: ignore[misc]
        metrics = output.meta_info["metrics"] if isinstance(output, DataProto) else output["metrics"]
        verdict = judge(take_reports(metrics, REPORT), self._support, first=not self._support_proved)
        self._support_metrics = verdict.metrics
        if not self._support_proved:
            logger.info(verdict.proof)
        self._support_proved = True
        return output


class SupportTrainerV1(SupportTrainer):
    """Mixin of verl's V1 trainers in front of ``OffPolicyTrainer`` or a subclass of it."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        self._install_support()

    def get_llm_client(self) -> Any:
        return note_supports(super().get_llm_client())  # type: ignore[misc]

    def _compute_log_probs(self, batch: Any, rows: Sequence[Pair]) -> list[list[float]]:
        # Rows of an extension's making were sampled from no support.
        flag = batch.extra_info.pop(FLAG, None)
        try:
            found: list[list[float]] = super()._compute_log_probs(batch, rows)  # type: ignore[misc]
            return found
        finally:
            if flag is not None:
                batch.extra_info[FLAG] = flag

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info[FLAG] = True
        return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info[FLAG] = True
        batch = super()._update_actor(batch, metrics)  # type: ignore[misc]
        metrics.update({f"offpolicy/support/{name}": value for name, value in self._support_metrics.items()})
        return batch


class SupportTrainerV0(SupportTrainer):
    """Mixin of verl's V0 trainer in front of ``OffPolicyRayTrainer``."""

    _manager: Any = None

    def init_workers(self) -> None:
        self._install_support()
        super().init_workers()  # type: ignore[misc]

    @property
    def llm_server_manager(self) -> Any:
        """verl's, whose client notes supports."""
        return self._manager

    @llm_server_manager.setter
    def llm_server_manager(self, manager: Any) -> None:
        get_client = manager.get_client
        manager.get_client = lambda *args, **kwargs: note_supports(get_client(*args, **kwargs))
        self._manager = manager

    def _compute_log_probs(self, batch: DataProto, rows: Sequence[Pair]) -> list[list[float]]:
        flag = batch.meta_info.pop(FLAG, None)
        try:
            found: list[list[float]] = super()._compute_log_probs(batch, rows)  # type: ignore[misc]
            return found
        finally:
            if flag is not None:
                batch.meta_info[FLAG] = flag

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        batch.meta_info[FLAG] = True
        found: tuple[DataProto, float] = super()._compute_old_log_prob(batch)  # type: ignore[misc]
        return found

    def _update_actor(self, batch: DataProto) -> DataProto:
        batch.meta_info[FLAG] = True
        output: DataProto = super()._update_actor(batch)  # type: ignore[misc]
        output.meta_info["metrics"].update(
            {f"offpolicy/support/{name}": value for name, value in self._support_metrics.items()}
        )
        return output
