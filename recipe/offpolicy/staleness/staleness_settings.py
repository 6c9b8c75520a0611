"""Parsing and validation of the keys ``offpolicy.staleness``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omegaconf import DictConfig

from ..batch.declared_keys import Rule, Section, choice, count, number
from ..batch.shipped_defaults import read_shipped_defaults
from .controller import AdaptSettings

SECTION = "offpolicy.staleness"
ETA, TOO_OLD, ADAPT = f"{SECTION}.eta", f"{SECTION}.too_old", f"{SECTION}.adapt"
TARGET, CEILING = f"{ADAPT}.ess", f"{ADAPT}.ceiling"
TooOld = Literal["wait", "mask", "refresh", "drop"]


@dataclass(frozen=True)
class StalenessSettings:
    """Settings of a run with bounded staleness.

    Attributes:
        eta: batches by which sampling may run ahead of training; the initial value if ``adapt`` moves it.
        too_old: treatment of prompts that take longer.
        refresh_limit: number of times that a prompt is sampled again.
        adapt: how eta moves; None if it is fixed.
    """

    eta: float
    too_old: TooOld
    refresh_limit: int
    adapt: AdaptSettings | None

    @classmethod
    def at(cls, eta: float, **changes: Any) -> StalenessSettings:
        """Build the shipped settings with this eta and these changes."""
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
        """The largest age, in versions, at which a row is trained."""
        return math.ceil(self.eta if self.adapt is None else self.adapt.ceiling)

    @property
    def masks(self) -> bool:
        """True if rows that are too old are masked."""
        return self.too_old in ("mask", "refresh")


_ADAPT = ("adapt.ess", ...)
KEYS = Section(
    SECTION,
    read_shipped_defaults("staleness"),
    {
        "eta": number("a number of batches, 0 or more, or null for verl's own keys", 0, null=True),
        "too_old": choice(*get_args(TooOld), read_with=("eta", ...)),
        "refresh_limit": count("a number of times, 1 or more", read_with=("too_old", "refresh")),
        "adapt.ess": number(
            "a share above 0 and up to 1, or null for an eta that is fixed", above=0, most=1, null=True
        ),
        "adapt.trainer_wait": number("a share of a step, 0 or more and below 1", 0, below=1, read_with=_ADAPT),
        "adapt.floor": number("a number of batches, 0 or more", 0, read_with=_ADAPT),
        "adapt.ceiling": number("a number of batches, 0 or more", 0, read_with=_ADAPT),
        "adapt.every": count("a number, 1 or more", read_with=_ADAPT),
        "adapt.patience": count("a number, 1 or more", read_with=_ADAPT),
        "adapt.step": number("a number of batches above 0", above=0, read_with=_ADAPT),
    },
    (
        Rule(
            "too_old",
            lambda values: (
                values["eta"] == 0 and values["too_old"] in ("drop", "refresh") and values["adapt.ess"] is None
            ),
            "every prompt of a step is waited for, so none becomes too old.",
            lambda values: "wait",
            "eta",
        ),
        Rule(
            "eta",
            lambda values: values["adapt.ess"] is not None and values["eta"] is None,
            f"{TARGET} moves eta from an initial value, and null leaves staleness to verl's own keys.",
            lambda values: values["adapt.floor"],
            "adapt.ess",
        ),
        Rule(
            "adapt.floor",
            lambda values: values["adapt.ess"] is not None and values["adapt.floor"] > values["adapt.ceiling"],
            "above the ceiling.",
            lambda values: values["adapt.ceiling"],
            "adapt.ceiling",
        ),
        Rule(
            "eta",
            lambda values: (
                None not in (values["adapt.ess"], values["eta"])
                and values["adapt.floor"] <= values["adapt.ceiling"]
                and not values["adapt.floor"] <= values["eta"] <= values["adapt.ceiling"]
            ),
            "it starts outside [adapt.floor, adapt.ceiling].",
            lambda values: min(max(values["eta"], values["adapt.floor"]), values["adapt.ceiling"]),
            "adapt.ess",
        ),
        Rule(
            "too_old",
            lambda values: values["adapt.ess"] is not None and values["too_old"] == "drop",
            "verl drops by one threshold for all prompts, but eta moves.",
            lambda values: "wait",
            "adapt.ess",
        ),
    ),
    {"eta": 2, "adapt.ess": 0.9},
)
find_problems = KEYS.find_problems
"""Find invalid values of ``offpolicy.staleness``."""
