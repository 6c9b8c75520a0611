"""Adapts eta during training: the largest eta at which the effective sample size (ESS) of the weights meets a target.

Raising eta helps only if the trainer waits for rows. A change takes effect after as many steps as rows are then old, so
the steps until then are ignored. After a decrease, eta stays until the ESS has improved by its deficit; otherwise it
would be raised again at once, because the trainer still waits where eta was too large.
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
        trainer_wait: share of a step; if the trainer waits no longer than this, a larger eta does not help.
        floor, ceiling: range of eta.
        every: minimum number of steps between two judgements.
        patience: number of judgements below the target in a row before eta decreases.
        step: size of a change.
    """

    ess: float
    trainer_wait: float
    floor: float
    ceiling: float
    every: int
    patience: int
    step: float


class EtaController:
    """Controller of eta; takes one observation per step.

    Args:
        settings: settings of the run.
        eta: initial value.

    Attributes:
        eta: value from the step after the last observation on.
    """

    def __init__(self, settings: AdaptSettings, eta: Fraction) -> None:
        self.settings = settings
        self.eta = eta
        self._window: list[tuple[float, float]] = []
        self._since, self._unsettled, self._low = 0, 0, 0
        self._lacked: float | None = None
        self._demanded = settings.ess

    def observe(self, ess: float, waited: float) -> str | None:
        """Observe one step, and change eta if enough observations agree.

        Args:
            ess: effective sample size of the weights, a share; NaN if the step has none.
            waited: share of the step that the trainer waited for rows.

        Returns:
            The reason for a change of eta; None if it has not changed.
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
        # Rows issued before the change are trained until then.
        self._unsettled = math.ceil(max(before, self.eta))
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
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
            ValueError: eta is outside [floor, ceiling].
        """
        self.eta, settings = Fraction(state["eta"]), self.settings
        if not Fraction(str(settings.floor)) <= self.eta <= Fraction(str(settings.ceiling)):
            raise ValueError(f"controller.eta={self.eta} is not in [{settings.floor:g}, {settings.ceiling:g}]")
        self._window = [(ess, waited) for ess, waited in state["window"]]
        self._since, self._unsettled, self._low = state["since"], state["unsettled"], state["low"]
        self._lacked, self._demanded = state["lacked"], state["demanded"]
