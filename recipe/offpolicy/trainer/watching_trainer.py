"""verl's V1 trainers with a look at the routes that verl's Megatron engine replays.

Seams in verl 0.9.1: ``_init_resource_pool_mgr(self)`` of ``verl.trainer.ppo.v1.trainer_base.PPOTrainer``, which maps
roles to workers.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from verl.trainer.ppo.utils import Role

from ..replay.megatron_report import REPORT
from ..replay.megatron_verdict import judge_megatron
from ..replay.megatron_worker import build_watched
from ..replay.replay_settings import read_megatron_mode
from ..replay.verdict import take_reports
from .replaying_trainer import ACTORS
from .trainer_v1 import OffPolicyTrainer

logger = logging.getLogger("verl.offpolicy")


class WatchingTrainer(OffPolicyTrainer):
    """Mixin of verl's V1 trainers in front of ``OffPolicyTrainer`` or a subclass of it."""

    role_worker_mapping: dict[Role, Any]
    _seen = False

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        mode = read_megatron_mode(self.config)
        assert mode is not None, "a run without replay has the trainer without it"
        workers = self.role_worker_mapping
        for role in (role for role in ACTORS if role in workers):
            workers[role] = ray.remote(build_watched(workers[role].__ray_actor_class__, mode))

    def _update_and_collect(self, update: Any, batch: Any) -> Any:
        output = super()._update_and_collect(update, batch)
        mode = read_megatron_mode(self.config)
        assert mode is not None
        proof = judge_megatron(take_reports(output["metrics"], REPORT), mode)
        if not self._seen:
            logger.info(proof)
        self._seen = True
        return output
