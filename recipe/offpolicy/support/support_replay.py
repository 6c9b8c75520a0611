"""Support replay of truncated sampling in a run: servers, client, workers that replay it, and the proof.

``verl_patches.truncated_sampling`` lists the patched functions of verl 0.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from verl_patches import engine_loss, truncated_sampling

from ..batch.reports import take_reports
from ..extensions.add_on import AddOn
from .client import note_supports
from .fsdp_engine import FLAG, REPORT, install_support
from .support_server import serve_supports
from .support_settings import SupportSettings
from .support_verdict import judge

logger = logging.getLogger("verl.offpolicy")


class SupportReplay(AddOn):
    """Replay of the support by the actor's engine, for both trainers.

    Args:
        settings: settings of the replay.
    """

    def __init__(self, settings: SupportSettings) -> None:
        self._settings = settings
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._proved = False

    def begin(self, config: DictConfig) -> None:
        engine_loss.check(truncated_sampling.SEAMS)
        serve_supports(self._settings)

    def engine_part(self) -> Callable[[Any], object]:
        return partial(install_support, unknown=self._settings.unknown)

    def rollout_client(self, client: Any) -> Any:
        return note_supports(client)

    def batch_flags(self) -> dict[str, Any]:
        # Rows of an extension were not sampled from a support.
        return {FLAG: True}

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        verdict = judge(take_reports(metrics, REPORT), self._settings, first=not self._proved)
        self._metrics = verdict.metrics
        if not self._proved:
            logger.info(verdict.proof)
        self._proved = True

    def metrics(self) -> dict[str, float]:
        return {f"offpolicy/support/{name}": value for name, value in self._metrics.items()}
