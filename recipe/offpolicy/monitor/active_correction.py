"""Decision on the correction and bounds of the next update, by alarms and calibration, between updates.

The active correction is the configured one or an alarm's fallback, with the configured bounds or with bounds that a
schedule has moved. One trainer process decides for all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from ..correction import CorrectionSpec, Statistic
from ..correction.bounds import Side, format_part_path
from ..fault_tolerance.checkpoints import find_changes
from .alarms import alarm_settings
from .alarms.alarms import CONFIGURED, Alarms
from .bounds import bound_settings
from .bounds.controller import Calibration

logger = logging.getLogger("verl.offpolicy")


class ActiveCorrection:
    """The active correction and its bounds.

    Args:
        spec: the configured correction.
        config: the composed configuration of the run, prepared by ``main_offpolicy``.
    """

    def __init__(self, spec: CorrectionSpec, config: DictConfig) -> None:
        self._configured = spec
        self._alarms = Alarms.from_config(config)
        self._calibration = Calibration.from_config(config, spec)
        self._noted = bound_settings.read_noted_keys(config)

    @property
    def spec(self) -> CorrectionSpec:
        """The correction of the next update, with its bounds."""
        if (fallback := self._alarms.fallback) is not None:
            return fallback
        return self._configured if self._calibration is None else self._calibration.spec

    @property
    def moving(self) -> dict[str, Side]:
        """Moving sides of masks and of ``WEIGHT``, whose bounds are sent with each update; empty during a fallback."""
        if self._calibration is None or self._alarms.fallback is not None:
            return {}
        return self._calibration.settings.moving

    @property
    def bounds(self) -> dict[str, dict[str, float | None]]:
        """Part -> its bounds at the next update, for the parts in ``moving``."""
        return self._calibration.bounds if self._calibration is not None and self.moving else {}

    def after_update(
        self,
        values: Mapping[str, float],
        histograms: Mapping[str, Statistic],
        extensions: Mapping[str, float] = MappingProxyType({}),
    ) -> bool:
        """Evaluate one update's statistics, and decide the correction and the bounds of the next update.

        Args:
            values: statistics under ``offpolicy/``.
            histograms: histograms of the parts in ``moving``, see ``bounds.bound_measurement``.
            extensions: metrics of extensions, by full name.

        Returns:
            Whether the active correction has changed. The new correction must then be sent to the workers and proved.

        Raises:
            AlarmError: an alarm ends the run.
        """
        moving = bool(self.moving)
        switched = self._alarms.judge(self.spec, values, extensions)
        if self._calibration is not None and moving and not switched:
            self._calibration.observe(histograms)
        elif self._calibration is not None:
            self._calibration.pause(histograms)
        return switched

    def metrics(self) -> dict[str, float]:
        """Return the metrics of alarms and bounds, under ``offpolicy/``; their keys are the same at every update."""
        calibrated = {} if self._calibration is None else self._calibration.metrics()
        return self._alarms.metrics() | calibrated

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        fallback = self._alarms.fallback
        return {
            "alarms": self._alarms.state(),
            "fallback": None if fallback is None else fallback.to_mapping(),
            "calibrate": self._noted,
            "calibration": None if self._calibration is None else self._calibration.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the parts of ``state`` for which this run has the same settings; see ``find_differences``."""
        alarms = state["alarms"]
        name, there = alarms["in_force"], self._alarms.get_fallback(alarms["in_force"])
        goes_on = there is not None and there.to_mapping() == state["fallback"]
        self._alarms.restore(alarms, in_force=name if goes_on else CONFIGURED)
        if self._calibration is not None and state["calibration"] is None and state["calibrate"] == self._noted:
            raise ValueError("calibration=null, but calibrate has a target")
        if self._calibration is not None and state["calibration"] is not None:
            self._calibration.restore(state["calibration"], same_keys=state["calibrate"] == self._noted)
            for part, bounds in self._calibration.bounds.items():
                logger.info("resuming with correction.%s at %s, as calibrated.", format_part_path(part), bounds)
        if goes_on:
            logger.warning("resuming with the fallback of alarm %s active: %s", name, state["fallback"])
        elif name != CONFIGURED:
            logger.warning("the fallback of alarm %s was active; now the configured correction is active.", name)


def find_differences(config: DictConfig, state: Mapping[str, Any] | None) -> list[str]:
    """List the keys, with both values, in which this run differs from the checkpoint with this ``state``."""
    noted = {"target_kept": None} if state is None else state["calibrate"]
    unset = {"target_ess": None}
    found = find_changes(unset | noted, unset | bound_settings.read_noted_keys(config), bound_settings.SECTION)
    if state is None or state["fallback"] is None:
        return found
    name = state["alarms"]["in_force"]
    alarm = alarm_settings.read_settings(config).get(name)
    configured = alarm.fallback.to_mapping() if alarm is not None and alarm.fallback is not None else {}
    return found + find_changes(state["fallback"], configured, f"{alarm_settings.SECTION}.{name}.fallback")


def list_dependents(config: DictConfig) -> list[str]:
    """List the keys of features that continue from a checkpoint's state: moving bounds, and alarms with a fallback."""
    moves = bound_settings.read_noted_keys(config) != {"target_kept": None}
    alarms = [name for name, rule in alarm_settings.read_settings(config).items() if rule.fallback is not None]
    return [bound_settings.SECTION] * moves + [f"{alarm_settings.SECTION}.{name}.fallback" for name in alarms]
