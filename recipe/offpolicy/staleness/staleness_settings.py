"""Parsing and validation of the keys ``offpolicy.staleness``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from ..batch.shipped_defaults import read_shipped_defaults
from ..correction import Problem
from ..correction.problem import format_value, remove, set_to
from .controller import AdaptSettings

SECTION = "offpolicy.staleness"
ETA, ADAPT = f"{SECTION}.eta", f"{SECTION}.adapt"
TARGET, CEILING = f"{ADAPT}.ess", f"{ADAPT}.ceiling"
TooOld = Literal["wait", "mask", "refresh", "drop"]


@dataclass(frozen=True)
class StalenessSettings:
    """Settings of a run whose staleness is bounded.

    Attributes:
        eta: batches by which sampling may run ahead of training; to begin with, where ``adapt`` moves it.
        too_old: what becomes of prompts that take longer.
        refresh_limit: times that a prompt is sampled anew.
        adapt: how eta moves; None where it is fixed.
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
        """Read the settings of a checked configuration; None where verl's own keys are in force."""
        values = _section(config)
        if not isinstance(values, Mapping) or values.get("eta") is None:
            return None
        return cls.at(**values)

    @property
    def oldest_age(self) -> int:
        """The greatest age, in versions, at which a row is trained."""
        return math.ceil(self.eta if self.adapt is None else self.adapt.ceiling)

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
    given = values.get("adapt", {})
    adapt = given if isinstance(given, Mapping) else {}
    yield from (*_find_unknown(SECTION, values, known), *_find_unknown(ADAPT, adapt, known["adapt"]))
    malformed = [
        *_find_malformed(SECTION, values, known, _WANTED),
        *_find_malformed(ADAPT, adapt, known["adapt"], _WANTED_TO_ADAPT),
    ]
    yield from malformed
    if not malformed:
        yield from _find_unread({**known, **values}, known)
        yield from _find_unmeant({**known["adapt"], **adapt}, known["adapt"], {**known, **values})


def _find_unknown(section: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Problem]:
    for name, value in values.items():
        if name not in known:
            key, fix = f"{section}.{name}", f"Known under {section}: {', '.join(known)}."
            yield _problem(key, value, "unknown key.", fix, *remove(key, value))


def _find_malformed(
    section: str, values: Mapping[str, Any], known: Mapping[str, Any], wanted: Mapping[str, Wanted]
) -> Iterator[Problem]:
    """Find values that are none of their key's."""
    for name, value in values.items():
        if name in known and not wanted[name][0](value):
            key = f"{section}.{name}"
            back = remove(key, value) if isinstance(known[name], Mapping) else (set_to(key, known[name]),)
            yield _problem(key, value, f"expected {wanted[name][1]}.", "", *back)


def _find_unread(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Problem]:
    """Find keys that others leave without effect."""
    eta, too_old = values["eta"], values["too_old"]
    key = f"{SECTION}.too_old"
    back = set_to(key, known["too_old"])
    if eta is None and too_old != known["too_old"]:
        yield _problem(key, too_old, f"read with {ETA} alone.", f"Set {ETA}=2 for example, or {back}.", back)
    elif eta == 0 and too_old in ("drop", "refresh") and values["adapt"].get("ess") is None:
        reason = "every prompt of a step is waited for, so that none becomes too old."
        yield _problem(key, too_old, reason, f"Set {back}.", back, beside={ETA: eta})
    limit, key = values["refresh_limit"], f"{SECTION}.refresh_limit"
    if limit != known["refresh_limit"] and too_old != "refresh":
        back = set_to(key, known["refresh_limit"])
        fix = f"Set {SECTION}.too_old=refresh, or {back}."
        yield _problem(
            key, limit, "read with too_old=refresh alone.", fix, back, beside={f"{SECTION}.too_old": too_old}
        )


def _find_unmeant(adapt: Mapping[str, Any], known: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find keys of ``adapt`` that nothing reads or that contradict each other."""
    target, floor, ceiling, eta = adapt["ess"], adapt["floor"], adapt["ceiling"], values["eta"]
    off = set_to(TARGET, None)
    if target is None:
        for name in (name for name, value in adapt.items() if value != known[name]):
            key = f"{ADAPT}.{name}"
            back = set_to(key, known[name])
            yield _problem(key, adapt[name], f"read with {TARGET} alone.", f"Set {TARGET}=0.9, or {back}.", back)
    elif eta is None:
        reason = f"it moves {ETA}, which is null and leaves staleness to verl's own keys."
        yield _problem(TARGET, target, reason, f"Set {ETA}={floor:g}, or {off}.", off, beside={ETA: eta})
    elif floor > ceiling:
        key = f"{ADAPT}.floor"
        back = set_to(key, ceiling)
        yield _problem(key, floor, "above the ceiling.", f"Set {back}.", back, beside={CEILING: ceiling})
    elif not floor <= eta <= ceiling:
        back = set_to(ETA, min(max(eta, floor), ceiling))
        reason = f"it begins outside of floor and ceiling, {floor:g} and {ceiling:g}."
        yield _problem(ETA, eta, reason, f"Set {back}.", back, beside={TARGET: target})
    elif values["too_old"] == "drop":
        key, back = f"{SECTION}.too_old", set_to(f"{SECTION}.too_old", "wait")
        reason = "verl drops by one threshold for all prompts, and eta moves."
        yield _problem(key, "drop", reason, f"Set {back}, or {off}.", back, beside={TARGET: target})


def _problem(
    key: str, value: Any, reason: str, fix: str, *overrides: str, beside: Mapping[str, Any] | None = None
) -> Problem:
    return Problem(key, value, reason, fix, parts=(), overrides=overrides, beside=dict(beside or {}))


def _section(config: DictConfig) -> Any:
    node = OmegaConf.select(config, SECTION, default=None)
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _is_eta(value: object) -> bool:
    return value is None or (_is_number(value) and value >= 0)  # type: ignore[operator]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


Wanted = tuple[Callable[[Any], bool], str]
"""Takes a value, and returns True if it is one; and what is wanted, in words."""
_BATCHES: Wanted = (lambda value: _is_number(value) and value >= 0, "a number of batches, 0 or more")
_STEPS: Wanted = (_is_count, "a number, 1 or more")
_WANTED: Mapping[str, Wanted] = {
    "eta": (_is_eta, "a number of batches, 0 or more, or null for verl's own keys"),
    "too_old": (lambda value: value in get_args(TooOld), f"one of {format_value(list(get_args(TooOld)))}"),
    "refresh_limit": (_is_count, "a number of times, 1 or more"),
    "adapt": (lambda value: isinstance(value, Mapping), "its keys"),
}
_WANTED_TO_ADAPT: Mapping[str, Wanted] = {
    "ess": (
        lambda value: value is None or (_is_number(value) and 0 < value <= 1),
        "a share above 0 and up to 1, or null for an eta that is fixed",
    ),
    "trainer_wait": (lambda value: _is_number(value) and 0 <= value < 1, "a share of a step, 0 or more and below 1"),
    "floor": _BATCHES,
    "ceiling": _BATCHES,
    "every": _STEPS,
    "patience": _STEPS,
    "step": (lambda value: _is_number(value) and value > 0, "a number of batches above 0"),
}
