"""Score centering in a run: servers, client, workers that compute the likeliest tokens' log-probs, and the proof.

``verl_patches.rollout_seams`` lists the patched functions of verl 0.9.1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from verl_patches import rollout_seams
from verl_patches.contract import check_all

from ..batch.plan import take_reports
from ..extensions.add_on import AddOn
from ..proof.verify import LivenessError
from ..support.support_replay import note_supports, serve_supports
from ..support.support_settings import CENTERING, SupportSettings
from .centering_engine import FLAG, REPORT, CenteringReport, install_centering

logger = logging.getLogger("verl.offpolicy")


class ScoreCentering(AddOn):
    """Feature that requests and transports the likeliest tokens, for both trainers.

    Args:
        settings: settings of the request.
    """

    def __init__(self, settings: SupportSettings) -> None:
        self._settings = settings
        self._metrics: Mapping[str, float] = MappingProxyType({})
        self._logged = False

    def begin(self, config: DictConfig) -> None:
        check_all(rollout_seams.SUPPORT)
        serve_supports(self._settings)

    def engine_part(self) -> Callable[[Any], object]:
        return install_centering

    def rollout_client(self, client: Any) -> Any:
        return note_supports(client, CENTERING)

    def batch_flags(self) -> dict[str, Any]:
        return {FLAG: True}

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        reports: list[CenteringReport] = take_reports(metrics, REPORT)
        if not reports:
            raise LivenessError(
                "correction.centering: the update returned no report, so no score was centred. The run uses a worker "
                "or engine other than the one that computes log-probs of the likeliest tokens."
            )
        tokens, checked, rows = (
            sum(getattr(each, name) for each in reports) for name in ("tokens", "checked", "compared")
        )
        mass = math.fsum(each.mass for each in reports) / tokens if tokens else math.nan
        size = sum(each.bytes for each in reports)
        self._metrics = {
            "head_mass": mass,
            "sampled_share": checked / tokens if tokens else math.nan,
            "bytes": float(size),
            "bytes_a_token": size / tokens if tokens else math.nan,
        }
        if not self._logged:
            logger.info(
                "score centering LIVE: log-probs of the %s likeliest tokens, %.1f%% of mu; checksums of %s rows as "
                "sampled; mu of %s of %s tokens equals its value in the list of likeliest tokens.",
                *(self._settings.size, 100 * mass, rows, checked, tokens),
            )
        self._logged = True

    def metrics(self) -> dict[str, float]:
        return {f"offpolicy/centering/{name}": value for name, value in self._metrics.items()}
