"""The learning rate by effective sample size: a factor per batch, proved by the optimizer's own rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from verl_patches import engine_loss, optimizer_steps

from ...batch.reports import take_reports
from ...correction import Problem
from ...proof.verify import LivenessError
from ..batch_view import BatchView
from ..extension import Advantages, Extension
from .settings import EssLrSettings, find_problems

logger = logging.getLogger("verl.offpolicy")

ERROR = 1e-12
"""Accepted relative difference of two learning rates."""


class EssLr(Extension):
    """The learning rate of one run; see ``settings.EssLrSettings`` for its section."""

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.ess_lr = EssLrSettings.from_mapping(section, settings)
        self._ess, self._factor, self._rate = math.nan, 1.0, math.nan
        self._proved = False

    def problems(self, config: DictConfig) -> Sequence[Problem]:
        return tuple(find_problems(self.section, self.ess_lr, config))

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    def begin(self, config: DictConfig) -> None:
        engine_loss.check(optimizer_steps.SEAMS)

    def engine_part(self) -> Callable[[Any], object]:
        from .scaled_step import scale_steps

        return scale_steps

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        statistics = batch.weigh()[1]
        # Without a weight, weight/ess is that of ones.
        self._ess = statistics["weight/ess" if "raw_weight/ess" in statistics else "rollout_ratio/ess"].value()
        self._factor = self.ess_lr.compute_factor(self._ess)

    def batch_flags(self) -> Mapping[str, Any]:
        from .scaled_step import FLAG

        return {FLAG: self._factor}

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        from .scaled_step import REPORT

        reports = take_reports(metrics, REPORT)
        if (wrong := find_wrong_rate(reports, self._factor)) is not None:
            raise LivenessError(f"{self.section}: {wrong}.")
        rates = [rate for report in reports for rate in report.read or ()]
        self._rate = rates[0] if rates else math.nan
        if not self._proved and self._factor < 1 and any(rates):
            self._proved = True
            logger.info("learning rate by ESS LIVE: factor %.4g at an ESS of %.4g", self._factor, self._ess)

    def unproved(self) -> str | None:
        return None if self._proved else f"no update had a factor below 1 and a rate above 0 ({self.section}.rule)."

    def metrics(self) -> Mapping[str, float]:
        return {"ess_lr/ess": self._ess, "ess_lr/factor": self._factor, "ess_lr/lr": self._rate}


def find_wrong_rate(reports: Sequence[Any], factor: float) -> str | None:
    """Find a step of one update that did not use the scheduler's rate times ``factor``; None: all steps did."""
    if not reports or None in reports:
        return "no step of verl's optimizer was seen in an update, so its learning rate is unknown"
    for report in reports:
        if report.factor != factor:
            return f"the worker's factor is {report.factor}, but the trainer's is {factor}"
        if report.read is None:
            if report.stepped:
                return "the engine's optimizer did not step, although the gradient is finite"
            continue
        for planned, read in zip(report.planned, report.read, strict=True):
            if not math.isclose(read, planned * factor, rel_tol=ERROR):
                due = f"{planned * factor:.6g}, the scheduler's rate times {factor:.6g}"
                return f"the optimizer stepped at a learning rate of {read:.6g} instead of {due}"
    return None
