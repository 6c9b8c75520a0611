"""Parsing and validation of the keys ``offpolicy.staleness``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from ..batch.shipped_defaults import read_shipped_defaults
from ..correction import Problem
from ..correction.problem import format_value, remove, set_to

SECTION = "offpolicy.staleness"
ETA = f"{SECTION}.eta"
TooOld = Literal["wait", "mask", "refresh", "drop"]


@dataclass(frozen=True)
class StalenessSettings:
    """Settings of a run whose staleness is bounded.

    Attributes:
        eta: batches by which sampling may run ahead of training.
        too_old: what becomes of prompts that take longer.
        refresh_limit: times that a prompt is sampled anew.
    """

    eta: float
    too_old: TooOld
    refresh_limit: int

    @classmethod
    def at(cls, eta: float, **changes: Any) -> StalenessSettings:
        """Build the shipped settings with this eta and these changes."""
        return cls(**{**read_shipped_defaults("staleness"), **changes, "eta": eta})

    @classmethod
    def from_config(cls, config: DictConfig) -> StalenessSettings | None:
        """Read the settings of a checked configuration; None where verl's own keys are in force."""
        values = _section(config)
        if not isinstance(values, Mapping) or values.get("eta") is None:
            return None
        return cls.at(**values)

    @property
    def masks(self) -> bool:
        """True if rows that are too old are masked."""
        return self.too_old in ("mask", "refresh")


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find what is wrong with ``offpolicy.staleness`` by itself."""
    values, known = _section(config), read_shipped_defaults("staleness")
    if values is None:
        return
    if not isinstance(values, Mapping):
        yield _problem(SECTION, values, "not the keys of a limit.", f"Set {ETA}=2, or remove this override.")
        return
    malformed = False
    for name, value in values.items():
        key = f"{SECTION}.{name}"
        if name not in known:
            fix = f"Known under {SECTION}: {', '.join(known)}."
            yield _problem(key, value, "unknown key.", fix, *remove(key, value))
        elif not _WANTED[name][0](value):
            malformed = True
            yield _problem(key, value, f"expected {_WANTED[name][1]}.", "", set_to(key, known[name]))
    if not malformed:
        yield from _find_unread({**known, **values}, known)


def _find_unread(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Problem]:
    """Find keys that others leave without effect."""
    eta, too_old = values["eta"], values["too_old"]
    key = f"{SECTION}.too_old"
    back = set_to(key, known["too_old"])
    if eta is None and too_old != known["too_old"]:
        yield _problem(key, too_old, f"read with {ETA} alone.", f"Set {ETA}=2 for example, or {back}.", back)
    elif eta == 0 and too_old in ("drop", "refresh"):
        reason = "every prompt of a step is waited for, so that none becomes too old."
        yield _problem(key, too_old, reason, f"Set {back}.", back, beside={ETA: eta})
    limit, key = values["refresh_limit"], f"{SECTION}.refresh_limit"
    if limit != known["refresh_limit"] and too_old != "refresh":
        back = set_to(key, known["refresh_limit"])
        fix = f"Set {SECTION}.too_old=refresh, or {back}."
        yield _problem(
            key, limit, "read with too_old=refresh alone.", fix, back, beside={f"{SECTION}.too_old": too_old}
        )


def _problem(
    key: str, value: Any, reason: str, fix: str, *overrides: str, beside: Mapping[str, Any] | None = None
) -> Problem:
    return Problem(key, value, reason, fix, parts=(), overrides=overrides, beside=dict(beside or {}))


def _section(config: DictConfig) -> Any:
    node = OmegaConf.select(config, SECTION, default=None)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _is_eta(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_WANTED: Mapping[str, tuple[Any, str]] = {
    "eta": (_is_eta, "a number of batches, 0 or more, or null for verl's own keys"),
    "too_old": (lambda value: value in get_args(TooOld), f"one of {format_value(list(get_args(TooOld)))}"),
    "refresh_limit": (_is_count, "a number of times, 1 or more"),
}
