"""Snapshots of the weights after recent updates, with which a V1 run identifies the weights that sampled its rows.

Functions called in verl 0.9.1: ``save_model_to_cpu(n)``, ``restore_model_from_cpu(n)`` and ``clear_cpu_model(n)`` of
``DetachActorWorker``, which verl's own separate_async mode also uses.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl_patches import engine_loss, trainer_v1

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..extensions.add_on import AddOn
from ..extensions.batch_view import BatchView
from ..extensions.v1_run import V1Run
from ..monitor.mismatch.snapshot_settings import SnapshotSettings, find_lag

logger = logging.getLogger("verl.offpolicy")


class WeightSnapshots(AddOn):
    """The feature behind ``offpolicy.late_weights``, which keeps snapshots.

    Args:
        run: a run by the V1 trainer.
        settings: settings of the snapshots.
    """

    def __init__(self, run: V1Run, settings: SnapshotSettings) -> None:
        self._run, self._settings = run, settings
        self._kept: deque[str] = deque()  # names of the kept weights, the current ones last
        self._told: list[int] = []  # lags that were logged

    def actor_class(self, worker: type) -> type:
        engine_loss.check(trainer_v1.SEAMS_OF_SNAPSHOTS)
        kind: type = DetachActorWorker
        return kind

    def old_log_prob(self, compute: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        metrics.update(self._find_lag(self._run.view(batch)))
        return compute(batch)

    def _find_lag(self, view: BatchView) -> dict[str, float]:
        """Score a few rows with the weights of each kept update, and return metrics.

        An update's weights are stored under its step's name, which does not clash with the names in verl's
        separate_async mode.
        """
        workers, kept = self._run.workers, self._kept
        kept.append(f"offpolicy-{self._run.global_steps}")
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
                "the rollout engine's weights lag by %d update%s: mu of %d sequences is %.2g nats per token from "
                "those weights, and %.2g from the current ones. verl's versions hide the lag because they count sent "
                "weights.",
                *(lag, "" if lag == 1 else "s", len(rows), apart[lag], apart[0]),
            )
        known = float("nan") if lag is None else float(lag)
        return {"offpolicy/late_weights/lag": known, "offpolicy/late_weights/apart": apart[0]}
