"""The choice of eta while a run trains: the largest at which the effective sample size of the weights meets a target.

Raising it pays only where the trainer waits for rows. What a change does is seen as many steps later as rows then are
old, so that steps until then are left out. After a fall eta stays until the sample size has improved by what it lacked:
without that it would be raised again at once, for where it was raised too far the trainer still waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class AdaptSettings:
    """Keys of ``offpolicy.staleness.adapt``.

    Attributes:
        ess: target, a share of the tokens.
        trainer_wait: share of a step; a trainer that waits no longer has no use for a larger eta.
        floor, ceiling: of eta.
        every: steps from one judgement to the next, at least.
        patience: judgements below the target, one after another, before eta falls.
        step: of a change.
    """

    ess: float
    trainer_wait: float
    floor: float
    ceiling: float
    every: int
    patience: int
    step: float


class EtaController:
    """Controller of eta; takes one observation a step.

    Args:
        settings: of the run.
        eta: to begin with.

    Attributes:
        eta: in force from the step after the last observation on.
    """

    def __init__(self, settings: AdaptSettings, eta: Fraction) -> None:
        self.settings = settings
        self.eta = eta
        self._window: list[tuple[float, float]] = []
        self._since, self._unsettled, self._low = 0, 0, 0
        self._lacked: float | None = None
        self._demanded = settings.ess

    def observe(self, ess: float, waited: float) -> str | None:
        """Observe one step, and change eta where enough of them say so.

        Args:
            ess: effective sample size of the weights, a share; NaN where the step has none.
            waited: share of the step that the trainer waited for rows.

        Returns:
            Why eta has changed; None if it has not.
        """
        self._since += 1
        if self._unsettled:
            self._unsettled -= 1
        elif not math.isnan(ess):
            self._window.append((ess, waited))
        if self._since < self.settings.every or not self._window:
            return None
        steps = len(self._window)
        mean, share = (sum(column) / steps for column in zip(*self._window, strict=True))
        self._window, self._since = [], 0
        seen = f"an ESS of {mean:.4f} in {steps} step(s), target {self.settings.ess:g}; the trainer waited {share:.1%}"
        return seen if self._judge(mean, share) else None

    def _judge(self, ess: float, waited: float) -> bool:
        """Return True if eta changes."""
        target = self.settings.ess
        if self._lacked is not None:
            self._demanded, self._lacked = max(ess + self._lacked, target), None
        if ess < target:
            self._low += 1
            if self._low < self.settings.patience or not self._move(-1):
                return False
            self._lacked = target - ess
            return True
        self._low = 0
        if waited <= self.settings.trainer_wait or ess < self._demanded or not self._move(1):
            return False
        self._demanded = target
        return True

    def _move(self, sign: int) -> bool:
        """Move eta by a step, within floor and ceiling; return True if it has moved."""
        before, low, high = (Fraction(str(value)) for value in (self.eta, self.settings.floor, self.settings.ceiling))
        self.eta = min(max(before + sign * Fraction(str(self.settings.step)), low), high)
        if self.eta == before:
            return False
        self._low = 0
        # Rows that were issued before the change are trained until then.
        self._unsettled = math.ceil(max(before, self.eta))
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain values."""
        return {
            "eta": str(self.eta),
            "window": [list(seen) for seen in self._window],
            "since": self._since,
            "unsettled": self._unsettled,
            "low": self._low,
            "lacked": self._lacked,
            "demanded": self._demanded,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's ``state``, of a run with the same settings.

        Raises:
            ValueError: eta is beyond floor and ceiling.
        """
        self.eta, settings = Fraction(state["eta"]), self.settings
        if not Fraction(str(settings.floor)) <= self.eta <= Fraction(str(settings.ceiling)):
            raise ValueError(f"controller.eta={self.eta} is not in [{settings.floor:g}, {settings.ceiling:g}]")
        self._window = [(ess, waited) for ess, waited in state["window"]]
        self._since, self._unsettled, self._low = state["since"], state["unsettled"], state["low"]
        self._lacked, self._demanded = state["lacked"], state["demanded"]
