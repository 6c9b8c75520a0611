"""The state machine of one alarm: consecutive updates outside a band fire it, inside a narrower band re-arm it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ...correction.bound_text import format_bounds

Action = Literal["off", "warn", "stop", "fallback"]
Event = Literal["none", "fired", "recovered"]

_SHOWN = 5  # most values listed in a message


@dataclass(frozen=True)
class Band:
    """Inclusive bounds; None leaves a side open. NaN is outside every band."""

    lower: float | None
    upper: float | None

    def contains(self, value: float) -> bool:
        """Return True if ``value`` is inside."""
        if math.isnan(value):
            return False
        return (self.lower is None or value >= self.lower) and (self.upper is None or value <= self.upper)

    def __str__(self) -> str:
        """Format as ``[0.5, 2]``."""
        return format_bounds({"lower": self.lower, "upper": self.upper})


@dataclass(frozen=True)
class AlarmRule:
    """The condition under which an alarm fires and re-arms.

    Attributes:
        band: accepted values.
        recovery: values that re-arm the alarm, a part of ``band``.
        patience: consecutive updates outside ``band`` after which it fires.
        recovery_patience: consecutive updates inside ``recovery`` after which it re-arms.
    """

    band: Band
    recovery: Band
    patience: int
    recovery_patience: int


@dataclass(frozen=True)
class AlarmState:
    """The counters of one alarm.

    Attributes:
        firing: it has fired and has not re-armed.
        beyond: consecutive updates outside the band, up to the last one.
        calm: consecutive updates inside the recovery band, up to the last one.
        values: the latest values of the updates that ``beyond`` counts.
    """

    firing: bool = False
    beyond: int = 0
    calm: int = 0
    values: tuple[float, ...] = ()

    def advance(self, rule: AlarmRule, value: float) -> tuple[AlarmState, Event]:
        """Return the state after an update with ``value``, and the event."""
        inside = rule.band.contains(value)
        state = replace(
            self,
            beyond=0 if inside else self.beyond + 1,
            calm=self.calm + 1 if rule.recovery.contains(value) else 0,
            values=() if inside else (*self.values, value)[-_SHOWN:],
        )
        if not state.firing and state.beyond >= rule.patience:
            return replace(state, firing=True), "fired"
        if state.firing and state.calm >= rule.recovery_patience:
            return replace(state, firing=False), "recovered"
        return state, "none"
