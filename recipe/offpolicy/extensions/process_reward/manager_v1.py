"""Agent loops that score rows, for verl's V1 trainer; see ``manager``."""

from __future__ import annotations

from typing import Any

import ray

from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl_patches import rollout_seams
from verl_patches.contract import check_all

from .manager import ScoringWorker

# Ray wraps the class in an actor class that cannot be subclassed, but keeps the class itself in its metadata.
_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class ScoringWorkerV1(ScoringWorker, _Worker):
    """verl's agent loop worker of the V1 trainer."""


class ScoringManagerV1(AgentLoopManagerTQ):
    """verl's manager of the V1 trainer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_all((*rollout_seams.AGENT_LOOPS, *rollout_seams.AGENT_LOOPS_V1))
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(ScoringWorkerV1)
