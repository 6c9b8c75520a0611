"""Routing replay of a V1 run on FSDP: workers that replay, a client that records routes, and the proof.

``verl_patches.router_replay`` lists the patched functions of verl 0.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from verl.workers.utils.padding import response_from_nested

from ..batch.queue_columns import FORWARD, put_columns, read_columns
from ..batch.reports import take_reports
from ..extensions.add_on import AddOn
from ..extensions.v1_run import V1Run
from ..recording.schema import WITHOUT_REPLAY
from .batch_routes import REPLAY_STEP
from .client import note_routes
from .fsdp_engine import REPORT, install_in_worker
from .replay_settings import ReplaySettings
from .tally import RoutingReport
from .verdict import judge, measure_routes

logger = logging.getLogger("verl.offpolicy")


class RoutingReplay(AddOn):
    """Replay of routes by the actor's engine.

    Args:
        run: a run by a V1 trainer.
        settings: settings of the replay.
    """

    def __init__(self, run: V1Run, settings: ReplaySettings) -> None:
        self._run, self._settings = run, settings
        self._reports: Sequence[RoutingReport] = ()  # of the updates of the current step

    def run_step(self, run: Callable[[], Any], metrics: dict[str, Any]) -> Any:
        self._reports = ()
        batch = run()
        # The counts are summed over all updates of the step, because verl would average shares even if some updates
        # have none.
        routing: dict[str, float] = measure_routes(self._reports) if self._reports else {}
        metrics.update({f"offpolicy/routing/{name}": value for name, value in routing.items()})
        return batch

    def engine_part(self) -> Callable[[Any], object]:
        return partial(install_in_worker, settings=self._settings)

    def rollout_client(self, client: Any) -> Any:
        return note_routes(client) if self._settings.mode == "R3" else client

    def batch_flags(self) -> dict[str, Any]:
        # Rows from an extension were not sampled, so they have no routes.
        return {REPLAY_STEP: self._run.global_steps}

    def old_log_prob(self, compute: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        return compute(self._put_native(batch) if self._records_without_replay else batch)

    @property
    def _records_without_replay(self) -> bool:
        settings = self._run.recording.settings
        return settings is not None and settings.without_replay and settings.records(self._run.global_steps)

    def _put_native(self, batch: Any) -> Any:
        """Store log pi_old under the trainer's own routes next to the batch, from a forward pass without replay."""
        temperature = self._run.config.actor_rollout_ref.rollout.temperature
        step = batch.extra_info.pop(REPLAY_STEP)
        batch.extra_info.update(FORWARD | {"temperature": temperature})
        self._run.workers.compute_log_prob(batch)
        batch.extra_info[REPLAY_STEP] = step
        found = read_columns(batch, "log_probs", "response_mask")
        native = response_from_nested(found["log_probs"], found["response_mask"])
        columns = {WITHOUT_REPLAY: native.float()}
        self._run.cost.add_columns(columns)
        return put_columns(batch, **columns)

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        tokens = sum(tag["prompt_len"] + tag["response_len"] for tag in batch.tags)
        tokens *= self._run.config.actor_rollout_ref.actor.ppo_epochs
        reports = take_reports(metrics, REPORT)
        if proof := judge(reports, self._settings.mode, tokens=tokens):
            logger.info(proof)
        self._reports = (*self._reports, *reports)
