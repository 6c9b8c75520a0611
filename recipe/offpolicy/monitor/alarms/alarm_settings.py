"""Parsing and validation of the keys ``offpolicy.alarms``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, OmegaConf

from ...batch.shipped_defaults import read_shipped_defaults
from ...correction import CorrectionSpec, Problem, SpecError
from ...correction.problem import remove, set_to
from ...correction.spelling import find_closest
from .alarm import Action, AlarmRule, Band
from .alarm_statistics import GROWTH, NAMES, OF_EXTENSIONS, RANGES, explain_constant

SECTION = "offpolicy.alarms"
DEFAULTS: Final[Mapping[str, dict[str, Any]]] = read_shipped_defaults("alarms")
"""Alarms and their keys, in the order of their evaluation."""

_BOUNDS = ("lower", "upper", "recovery_lower", "recovery_upper")
_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class AlarmSettings:
    """The configuration of one alarm.

    Attributes:
        fallback: the correction to fall back to; None with another action.
        options: names of the options that it was put together from.
        return_after: consecutive updates inside the recovery band after which the configured correction returns; None
            for never.
        window: updates that the growth of the mismatch is seen against.
        least: mismatch, in nats a token, below which there is no growth.
    """

    name: str
    action: Action
    rule: AlarmRule
    fallback: CorrectionSpec | None
    options: tuple[str, ...]
    return_after: int | None
    window: int
    least: float

    def to_mapping(self) -> dict[str, Any]:
        """Return what decides on firing and on the action, as values that JSON holds."""
        fallback = None if self.fallback is None else self.fallback.to_mapping()
        return asdict(self.rule) | {
            "action": self.action,
            "fallback": fallback,
            "return_after": self.return_after,
            "window": self.window,
            "least": self.least,
        }


def read_settings(config: DictConfig) -> dict[str, AlarmSettings]:
    """Read the alarms that are not off, by name, of a configuration without problems (``find_problems``).

    An alarm on an extension's metric is off where the extension is.
    """
    return {
        name: _read_alarm(name, values)
        for name, values in _read_values(config).items()
        if values["action"] != "off" and _is_measured(name, config)
    }


def find_problems(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find the problems of the keys ``offpolicy.alarms`` beside the correction ``spec``."""
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig):
        yield _problem(SECTION, section, "its keys have no values.", "Remove this override.")
        return
    for name in map(str, section):
        key, values = f"{SECTION}.{name}", section[name]
        if name not in DEFAULTS:
            near = find_closest(name, NAMES)
            fix = f"Did you mean {SECTION}.{near}?" if near else f"Choose of {', '.join(NAMES)}."
            yield _problem(key, values, "no alarm has this name.", fix)
        elif not isinstance(values, DictConfig):
            action = values if values in get_args(Action) else "off"
            fix = f"Set {key}.action={action}{' to do without it' if action == 'off' else ''}."
            yield _problem(key, values, "its keys have no values.", fix, f"{key}={{action: '{action}'}}")
        else:
            for unknown in sorted(set(map(str, values)) - set(DEFAULTS[name])):
                given = values[unknown]
                near = find_closest(unknown, DEFAULTS[name])
                moved = (*remove(f"{key}.{unknown}", given), set_to(f"{key}.{near}", given)) if near else ()
                fix = f"Did you mean {key}.{near}?" if near else f"Known under {key}: {', '.join(DEFAULTS[name])}."
                yield _problem(f"{key}.{unknown}", given, "unknown key.", fix, *moved)
    for name, alarm in _read_values(config).items():
        found = list(_find_malformed(name, alarm))
        if found:
            yield from found
        elif name in OF_EXTENSIONS:
            yield from _find_pointless_of_extension(name, alarm, config)
        else:
            yield from _find_pointless(name, alarm, spec, config)


def _is_measured(name: str, config: DictConfig) -> bool:
    """Return True if what the alarm is on is part of the run."""
    return name not in OF_EXTENSIONS or isinstance(OmegaConf.select(config, OF_EXTENSIONS[name][0]), DictConfig)


def _problem(key: str, value: Any, reason: str, fix: str, *overrides: str) -> Problem:
    return Problem(key, value, reason, fix, parts=(), overrides=overrides)


def _reset_to_defaults(name: str, *parts: str) -> tuple[str, ...]:
    """Build the overrides that set these keys of an alarm to their defaults."""
    return tuple(set_to(f"{SECTION}.{name}.{part}", DEFAULTS[name][part]) for part in parts)


def _read_values(config: DictConfig) -> dict[str, dict[str, Any]]:
    section = OmegaConf.select(config, SECTION)
    given: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else {}
    # A configuration without the section, as of a test of something else, has no alarms.
    names = DEFAULTS if given else {}
    values = {name: dict(defaults) for name, defaults in DEFAULTS.items() if name in names}
    for name in values:
        # find_problems names what is no mapping.
        values[name] |= given[name] if isinstance(given.get(name), dict) else {}
    for alarm in values.values():
        # YAML reads a bare off as false.
        alarm["action"] = "off" if alarm["action"] is False else alarm["action"]
    return values


def _read_alarm(name: str, values: Mapping[str, Any]) -> AlarmSettings:
    fallback = values["fallback"]
    resolved = isinstance(fallback, Mapping)
    if values["action"] == "fallback" and not resolved:
        reason = "names of options, which main_offpolicy has not replaced by their values."
        raise SpecError(reason, key=f"{SECTION}.{name}.fallback", value=fallback)
    return AlarmSettings(
        name=name,
        action=values["action"],
        rule=AlarmRule(
            band=Band(_float(values["lower"]), _float(values["upper"])),
            recovery=Band(_float(values["recovery_lower"]), _float(values["recovery_upper"])),
            patience=values["patience"],
            recovery_patience=values["recovery_patience"],
        ),
        fallback=CorrectionSpec.from_mapping(fallback["correction"]) if resolved else None,
        options=tuple(fallback["options"]) if resolved else (),
        return_after=values["return_after"],
        window=values.get("window", 0),
        least=values.get("least", 0.0),
    )


def _find_malformed(name: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    def wrong(part: str, reason: str, fix: str, *overrides: str) -> Problem:
        return _problem(f"{SECTION}.{name}.{part}", values[part], reason, fix, *overrides)

    if values["action"] not in get_args(Action):
        yield wrong(
            "action", "no action.", f"Set one of {', '.join(get_args(Action))}.", *_reset_to_defaults(name, "action")
        )
    for part in _BOUNDS:
        if values[part] is not None and not _is_number(values[part]):
            yield wrong(
                part, "not a number.", "Set one, or null to leave the side open.", *_reset_to_defaults(name, *_BOUNDS)
            )
            return
    for part, least in (("patience", 1), ("recovery_patience", 1), ("window", 2), ("return_after", 1)):
        if part in values and not (part == "return_after" and values[part] is None):
            value = values[part]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                reason = f"a count of updates, a whole number of at least {least}."
                yield wrong(part, reason, "", *_reset_to_defaults(name, part))
                return
    if "least" in values and not (_is_number(values["least"]) and values["least"] > 0):
        yield wrong("least", "nats a token, a number > 0.", "", *_reset_to_defaults(name, "least"))
    yield from _check_band(name, values)
    back = values["return_after"]
    if back is not None and back < (patience := values["recovery_patience"]):
        key = f"{SECTION}.{name}"
        reason = f"before the alarm has re-armed, after {key}.recovery_patience={patience} updates."
        fix = f"Set {patience} or more."
        yield wrong("return_after", reason, fix, set_to(f"{key}.return_after", patience))


def _check_band(name: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find bounds that cross, lie beyond what the alarm measures, or do not fit the recovery bounds."""
    key, shipped = f"{SECTION}.{name}", _reset_to_defaults(name, *_BOUNDS)
    lower, upper = values["lower"], values["upper"]
    if lower is None and upper is None:
        fix = f"Set a bound, or {key}.action=off."
        yield _problem(f"{key}.lower", None, "with both sides open it never fires.", fix, *shipped)
        return
    if lower is not None and upper is not None and lower > upper:
        reason = f"above {key}.upper={upper}, so that every value is beyond."
        yield _problem(f"{key}.lower", lower, reason, "", *shipped)
        return
    least, greatest = RANGES[name]
    within = f"it lies between {least:g} and {greatest:g}" if math.isfinite(greatest) else f"it is {least:g} or more"
    for side, bound in (("lower", lower), ("upper", upper)):
        if bound is None:
            continue
        below, above = (bound <= least, bound > greatest) if side == "lower" else (bound < least, bound >= greatest)
        if below or above:
            never = below == (side == "lower")
            happens = (
                "no value is beyond, and it never fires" if never else "every value is beyond, and it always fires"
            )
            yield _problem(f"{key}.{side}", bound, f"{within}: {happens}.", "", *shipped)
            return
    fit = True
    for side, sign in (("lower", 1.0), ("upper", -1.0)):
        bound, recovery = values[side], values[f"recovery_{side}"]
        if (bound is None) != (recovery is None):
            unset = f"recovery_{side}" if recovery is None else side
            given = bound if recovery is None else recovery
            fix = f"Set both, or neither; {key}.{unset}={given} for example."
            both = set_to(f"{key}.{unset}", given)
            yield _problem(f"{key}.{unset}", None, f"{side} and recovery_{side} go together.", fix, both)
        elif bound is not None and sign * recovery < sign * bound:
            reason = f"looser than {key}.{side}={bound}: it would re-arm while it fires."
            stricter = f"{key}.recovery_{side}"
            yield _problem(stricter, recovery, reason, f"Set {bound}, or a stricter one.", set_to(stricter, bound))
            fit = False
    low, high = values["recovery_lower"], values["recovery_upper"]
    if fit and low is not None and high is not None and low > high:
        reason = f"above {key}.recovery_upper={high}, so that it would never re-arm."
        yield _problem(f"{key}.recovery_lower", low, reason, "", *shipped)


def _find_pointless(
    name: str, values: Mapping[str, Any], spec: CorrectionSpec, config: DictConfig
) -> Iterator[Problem]:
    key, action = f"{SECTION}.{name}", values["action"]
    if action == "fallback" and not values["fallback"]:
        override = set_to(f"{key}.fallback", ["tis_token", "gsm"])
        yield _problem(f"{key}.fallback", values["fallback"], "nothing to fall back to.", "", override)
    if action != "fallback" and values["fallback"]:
        names = values["fallback"]
        given = names["options"] if isinstance(names, Mapping) else names
        reason, fix = f"never taken with action={action}.", f"Set {key}.action=fallback, or null."
        yield _problem(f"{key}.fallback", given, reason, fix, set_to(f"{key}.action", "fallback"))
    if values["return_after"] is not None and action != "fallback":
        reason, fix = f"nothing to return from with action={action}.", f"Set null, or {key}.action=fallback."
        yield _problem(f"{key}.return_after", values["return_after"], reason, fix)
    if action not in ("stop", "fallback"):
        return
    measured = OmegaConf.select(config, _MU)
    if spec.is_none and not measured:
        reason = "with correction=none and no rollout log-probs there is nothing to measure."
        fix = f"Set {_MU}=true, or {key}.action=off."
        yield _problem(f"{key}.action", action, reason, fix, set_to(_MU, True))
    elif reason := explain_constant(name, spec):
        fix = f"Set {key}.action=warn, or off."
        yield _problem(f"{key}.action", action, reason, fix)


def _find_pointless_of_extension(name: str, values: Mapping[str, Any], config: DictConfig) -> Iterator[Problem]:
    key, section = f"{SECTION}.{name}", OF_EXTENSIONS[name][0]
    given = {part: values[part] for part in ("fallback", "return_after") if values[part] is not None}
    if values["action"] == "fallback":
        reason, fix = f"another correction does not change what {section} measures.", f"Set {key}.action=warn, or stop."
        yield _problem(f"{key}.action", "fallback", reason, fix)
        return
    for part, value in given.items():
        shown = value["options"] if isinstance(value, Mapping) else value
        reason = f"this alarm has no fallback: another correction does not change what {section} measures."
        yield _problem(f"{key}.{part}", shown, reason, "Set null.")
    if values["action"] == "stop" and not _is_measured(name, config):
        reason, fix = f"with {section}=null there is nothing to measure.", f"Set {key}.action=warn, or off."
        yield _problem(f"{key}.action", "stop", reason, fix)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["DEFAULTS", "GROWTH", "SECTION", "AlarmSettings", "find_problems", "read_settings"]
