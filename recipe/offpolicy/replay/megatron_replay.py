"""Monitoring of the routes that verl's Megatron engine replays, in a V1 run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ..batch.reports import take_reports
from ..extensions.add_on import AddOn
from .batch_routes import Mode
from .megatron_engine import watch_actor
from .megatron_report import REPORT
from .megatron_verdict import judge_megatron

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
