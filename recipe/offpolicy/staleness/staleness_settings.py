"""The keys under ``offpolicy.staleness``, and the controller that adapts eta to a target ESS.

Raising eta helps only if the trainer waits for rows. A change of eta takes effect after as many steps as the rows are
old at that time, and these steps are ignored. After a decrease, eta stays the same until the ESS has improved by the
amount by which it had missed the target. Otherwise, eta would be raised again immediately, because the trainer still
waits for rows although eta was too large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from omegaconf import DictConfig

from ..batch.declared_keys import Rule, Section, choice, count, number, read_shipped_defaults
from ..extensions.setting_checks import declare_keys

_ADAPT = ("adapt.ess", ...)
_Batches = Annotated[float, number("a number of batches, 0 or more", 0, read_with=_ADAPT)]
_Count = Annotated[int, count("a number, 1 or more", read_with=_ADAPT)]


@dataclass(frozen=True)
class AdaptSettings:
    """Keys of ``offpolicy.staleness.adapt``.

    Attributes:
        ess: target of the ESS, as a share of the tokens.
        trainer_wait: share of a step; a larger eta helps only if the trainer waits for more than this share.
        floor, ceiling: smallest and largest eta.
        every: minimum number of steps from one decision to the next.
        patience: number of consecutive decisions with an ESS below the target before eta decreases.
        step: amount by which eta changes.
    """

    ess: Annotated[float, number("a share above 0 and up to 1, or null for a fixed eta", above=0, most=1, null=True)]
    trainer_wait: Annotated[float, number("a share of a step, 0 or more and below 1", 0, below=1, read_with=_ADAPT)]
    floor: _Batches
    ceiling: _Batches
    every: _Count
    patience: _Count
    step: Annotated[float, number("a number of batches above 0", above=0, read_with=_ADAPT)]


_STATE = ("since", "unsettled", "low", "lacked", "demanded")
"""Attributes of the controller that a checkpoint stores unchanged, named without their leading underscore."""


class EtaController:
    """Controller of eta; receives one observation per step.

    Args:
        settings: settings of the run.
        eta: initial value.

    Attributes:
        eta: value for the steps after the last observation.
    """

    def __init__(self, settings: AdaptSettings, eta: Fraction) -> None:
        self.settings, self.eta = settings, eta
        self._window: list[tuple[float, float]] = []
        self._since, self._unsettled, self._low = 0, 0, 0
        self._lacked: float | None = None
        self._demanded = settings.ess

    def observe(self, ess: float, waited: float) -> str | None:
        """Record the observation of one step, and change eta if enough observations agree.

        Args:
            ess: effective sample size of the weights, as a share of the tokens; NaN if the step has none.
            waited: share of the step's duration for which the trainer waited for rows.

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
        """Decide whether eta changes; return True if it does."""
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
        """Change eta by one step, within floor and ceiling; return True if eta has changed."""
        before, low, high = (Fraction(str(value)) for value in (self.eta, self.settings.floor, self.settings.ceiling))
        self.eta = min(max(before + sign * Fraction(str(self.settings.step)), low), high)
        if self.eta == before:
            return False
        self._low = 0
        # Until then, training uses rows that were issued before the change.
        self._unsettled = math.ceil(max(before, self.eta))
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        plain = {name: getattr(self, f"_{name}") for name in _STATE}
        return {"eta": str(self.eta), "window": [list(seen) for seen in self._window]} | plain

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the ``state`` from a checkpoint of a run with the same settings.

        Raises:
            ValueError: eta is outside [floor, ceiling].
        """
        self.eta, settings = Fraction(state["eta"]), self.settings
        if not Fraction(str(settings.floor)) <= self.eta <= Fraction(str(settings.ceiling)):
            raise ValueError(f"controller.eta={self.eta} is not in [{settings.floor:g}, {settings.ceiling:g}]")
        self._window = [(ess, waited) for ess, waited in state["window"]]
        for name in _STATE:
            setattr(self, f"_{name}", state[name])


SECTION = "offpolicy.staleness"
ETA, TOO_OLD, ADAPT = f"{SECTION}.eta", f"{SECTION}.too_old", f"{SECTION}.adapt"
TARGET, CEILING = f"{ADAPT}.ess", f"{ADAPT}.ceiling"
TooOld = Literal["wait", "mask", "refresh", "drop"]


@dataclass(frozen=True)
class StalenessSettings:
    """Settings of a run with bounded staleness.

    Attributes:
        eta: number of batches by which sampling may run ahead of training; the initial value if ``adapt`` is set.
        too_old: handling of prompts whose rows would become older than eta allows.
        refresh_limit: largest number of times that a prompt is sampled again.
        adapt: settings of the controller that adapts eta; None if eta is fixed.
    """

    eta: Annotated[float, number("a number of batches, 0 or more, or null for verl's own keys", 0, null=True)]
    too_old: Annotated[TooOld, choice(*get_args(TooOld), read_with=("eta", ...))]
    refresh_limit: Annotated[int, count("a number of times, 1 or more", read_with=("too_old", "refresh"))]
    adapt: AdaptSettings | None

    @classmethod
    def at(cls, eta: float, **changes: Any) -> StalenessSettings:
        """Build the default settings, with this eta and the given overrides."""
        shipped = read_shipped_defaults("staleness")
        adapt = {**shipped["adapt"], **changes.pop("adapt", {})}
        settings = None if adapt["ess"] is None else AdaptSettings(**adapt)
        return cls(**{**shipped, **changes, "eta": eta, "adapt": settings})

    @classmethod
    def from_config(cls, config: DictConfig) -> StalenessSettings | None:
        """Read the settings of a checked configuration; None if verl's own keys apply."""
        values = KEYS.read(config)
        if not isinstance(values, Mapping) or values.get("eta") is None:
            return None
        return cls.at(**values)

    @property
    def oldest_age(self) -> int:
        """The largest age, in versions, at which a row is used for training."""
        return math.ceil(self.eta if self.adapt is None else self.adapt.ceiling)

    @property
    def masks(self) -> bool:
        """True if rows that are too old are masked."""
        return self.too_old in ("mask", "refresh")


KEYS = Section(
    SECTION,
    read_shipped_defaults("staleness"),
    declare_keys(StalenessSettings) | declare_keys(AdaptSettings, "adapt."),
    (
        Rule(
            "too_old",
            lambda v: v["eta"] == 0 and v["too_old"] in ("drop", "refresh") and v["adapt.ess"] is None,
            "the trainer waits for all prompts of a step, so no prompt becomes too old.",
            lambda v: "wait",
            "eta",
        ),
        Rule(
            "eta",
            lambda v: v["adapt.ess"] is not None and v["eta"] is None,
            f"{TARGET} adapts eta from an initial value, but null leaves staleness to verl's own keys.",
            lambda v: v["adapt.floor"],
            "adapt.ess",
        ),
        Rule(
            "adapt.floor",
            lambda v: v["adapt.ess"] is not None and v["adapt.floor"] > v["adapt.ceiling"],
            "above the ceiling.",
            lambda v: v["adapt.ceiling"],
            "adapt.ceiling",
        ),
        Rule(
            "eta",
            lambda v: (
                None not in (v["adapt.ess"], v["eta"])
                and v["adapt.floor"] <= v["adapt.ceiling"]
                and not v["adapt.floor"] <= v["eta"] <= v["adapt.ceiling"]
            ),
            "the initial value is outside [adapt.floor, adapt.ceiling].",
            lambda v: min(max(v["eta"], v["adapt.floor"]), v["adapt.ceiling"]),
            "adapt.ess",
        ),
        Rule(
            "too_old",
            lambda v: v["adapt.ess"] is not None and v["too_old"] == "drop",
            "verl's drop uses one threshold for all prompts, but eta changes during the run.",
            lambda v: "wait",
            "adapt.ess",
        ),
    ),
    {"eta": 2, "adapt.ess": 0.9},
)
find_problems = KEYS.find_problems
"""Find invalid values of ``offpolicy.staleness``."""
