"""Monitoring of the routes that verl's Megatron engine replays, in a V1 run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..batch.reports import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from .batch_routes import Mode
from .megatron_engine import REPORT, MegatronReport, watch_actor


def judge_megatron(reports: Sequence[MegatronReport], mode: Mode) -> str:
    """Judge the reports of one update, one per mini-batch from every rank of the last pipeline stage.

    If replay failed on any stage, the worker has already stopped the run.

    Returns:
        A sentence for the log.

    Raises:
        LivenessError: no router replayed a route.
    """
    layers = sorted({layer for report in reports for layer in report.layers})
    replayed, forwarded = (sum(getattr(report, name) for report in reports) for name in ("tokens", "forwarded"))
    if not replayed:
        seen = f"{len(layers)} layers replayed no token" if layers else "no router of the last stage replays"
        raise LivenessError(
            f"routing replay: actor_rollout_ref.actor.megatron.router_replay.mode={mode}, but {seen}. Fix: train a "
            f"mixture of experts with verl's own Megatron engine, or set the key to disabled."
        )
    placed = all(report.placed for report in reports)
    told = (
        "which equal the shipped routes"
        if placed
        else "which were not compared with the shipped routes, because verl splits these"
    )
    return (
        f"routing replay {mode} LIVE on Megatron, in layers {layers} of the last stage: {replayed / forwarded:.1%} of "
        f"tokens sent to the experts that verl's RouterReplay names, {told}."
    )


logger = logging.getLogger("verl.offpolicy")


class MegatronReplay(AddOn):
    """The proof of verl's own replay.

    Args:
        mode: verl's replay mode.
    """

    def __init__(self, mode: Mode) -> None:
        self._mode: Mode = mode
        self._seen = False

    def engine_part(self) -> Callable[[Any], object]:
        return partial(watch_actor, mode=self._mode)

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        proof = judge_megatron(take_reports(metrics, REPORT), self._mode)
        if not self._seen:
            logger.info(proof)
        self._seen = True
