"""Alarms: the keys ``offpolicy.alarms``, the number that each alarm compares with its bounds, and its state machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from ...batch.declared_keys import Key, Rule, Section, count, number, read_shipped_defaults
from ...correction import CorrectionSpec, Problem, SpecError
from ...correction.bounds import format_bounds
from ...correction.problem import find_closest, set_to
from ...correction.proximal import OF_THE_TRAINER

Action = Literal["off", "warn", "stop", "fallback"]
Event = Literal["none", "fired", "recovered"]

_SHOWN = 5  # largest number of values in a message


@dataclass(frozen=True)
class Band:
    """A range with inclusive bounds; None means no bound on that side. NaN is outside every band."""

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
        recovery: values that re-arm the alarm; a subset of ``band``.
        patience: number of consecutive updates outside ``band`` after which the alarm fires.
        recovery_patience: number of consecutive updates inside ``recovery`` after which the alarm re-arms.
    """

    band: Band
    recovery: Band
    patience: int
    recovery_patience: int


@dataclass(frozen=True)
class AlarmState:
    """The counters of one alarm.

    Attributes:
        firing: the alarm has fired and has not re-armed.
        beyond: number of consecutive updates outside the band, up to and including the last update.
        calm: number of consecutive updates inside the recovery band, up to and including the last update.
        values: values of the most recent updates that ``beyond`` counts.
    """

    firing: bool = False
    beyond: int = 0
    calm: int = 0
    values: tuple[float, ...] = ()

    def advance(self, rule: AlarmRule, value: float) -> tuple[AlarmState, Event]:
        """Return the state after an update with ``value``, and the event that occurred."""
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


NAMES: Final = ("ess", "mean_weight", "kept_share", "nonfinite", "mismatch_growth", "opd_overlap")
GROWTH: Final = "mismatch_growth"
RANGES: Final = {
    "ess": (0.0, 1.0),
    "mean_weight": (0.0, math.inf),
    "kept_share": (0.0, 1.0),
    "nonfinite": (0.0, math.inf),
    "mismatch_growth": (0.0, math.inf),
    "opd_overlap": (0.0, 1.0),
}
"""Smallest and largest possible value of each alarm's statistic."""
OF_EXTENSIONS: Final[Mapping[str, tuple[str, str]]] = {"opd_overlap": ("opd", "opd/gap/extreme_share")}
"""Alarm on an extension's metric -> the section that must be on, and the metric; updates where it is NaN do not
count."""
_COUNTED: Final = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages")


def find_statistic(name: str, spec: CorrectionSpec) -> str:
    """Return the name of the statistic that an alarm reads: a name under ``offpolicy/``, or an extension's.

    Without a weight, the alarm reads the statistic of the ratio that a weight would use. This is pi_old / mu, or pi /
    mu if pi_old does not come from the trainer's weights, because pi_old / mu then shows no mismatch.
    """
    trainers_own = spec.proximal in OF_THE_TRAINER
    ratio = "rollout_ratio" if trainers_own else "full_ratio"
    match name:
        case "ess":
            return "weight/ess" if spec.all_weights else f"{ratio}/ess"
        case "mean_weight":
            if not spec.all_weights:
                return f"{ratio}/mean"
            # Self-normalised weights always have mean 1.
            return "raw_weight/mean" if spec.normalized is not None else "weight/mean"
        case "kept_share":
            return "keep/token_share"
        case "nonfinite":
            return "nonfinite"
        case "mismatch_growth":
            return "kl/k3" if trainers_own else f"{ratio}/chi2"
        case _ if name in OF_EXTENSIONS:
            return OF_EXTENSIONS[name][1]
        case _:
            raise ValueError(f"no alarm {name!r}: one of {', '.join(NAMES)}")


def explain_constant(name: str, spec: CorrectionSpec) -> str:
    """Return the reason why an alarm's statistic cannot change under a correction; empty if it can change."""
    if name == "kept_share" and not spec.masks and not spec.weight_rejects:
        return "the correction has no mask and no weight that rejects, so everything is kept."
    return ""


def read_value(name: str, spec: CorrectionSpec, values: Mapping[str, float]) -> float:
    """Read an alarm's value from the statistics of an update; NaN if it is missing."""
    if name == "nonfinite":
        found = [values[key] for what in _COUNTED if (key := f"nonfinite/{what}") in values]
        return sum(found) if found else math.nan
    return values.get(find_statistic(name, spec), math.nan)


def compute_growth(past: Sequence[float], value: float, *, history: int, least: float) -> float | None:
    """Compute ``value`` divided by the median of ``past``; None while fewer than ``history`` values are known.

    Args:
        past: mismatch of the previous updates, finite.
        least: lower limit that is applied to both the value and the median, so that growth from near zero is ignored.
    """
    if math.isnan(value):
        return math.nan
    if len(past) < history:
        return None
    return max(value, least) / max(median(past), least)


SECTION = "offpolicy.alarms"
DEFAULTS: Final[Mapping[str, dict[str, Any]]] = read_shipped_defaults("alarms")
"""Alarms and their keys, in the order of their evaluation."""

_BOUNDS = ("lower", "upper", "recovery_lower", "recovery_upper")
_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class AlarmSettings:
    """The configuration of one alarm.

    Attributes:
        fallback: the fallback correction; None if the action is not ``fallback``.
        options: names of the options from which the fallback was composed.
        return_after: consecutive updates inside the recovery band after which the configured correction returns; None
            for never.
        window: number of updates whose median mismatch is the reference value for growth.
        least: mismatch, in nats per token, below which growth is ignored.
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
        """Return the fields that determine when the alarm fires and what it does, as JSON values."""
        fallback = None if self.fallback is None else self.fallback.to_mapping()
        return asdict(self.rule) | {
            "action": self.action,
            "fallback": fallback,
            "return_after": self.return_after,
            "window": self.window,
            "least": self.least,
        }


def read_settings(config: DictConfig) -> dict[str, AlarmSettings]:
    """Read the alarms that are on, by name, from a configuration without problems (see ``find_problems``).

    An alarm on an extension's metric is off if the extension is off.
    """
    return {
        name: _read_alarm(name, values)
        for name, values in _read_values(config).items()
        if values["action"] != "off" and _is_measured(name, config)
    }


def find_problems(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find the problems of the keys ``offpolicy.alarms`` together with the correction ``spec``."""
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig):
        yield _problem(SECTION, section, "the section is null, so its keys have no values.", "Remove this override.")
        return
    alarms = _read_values(config)
    for name in map(str, section):
        key, values = f"{SECTION}.{name}", section[name]
        if name not in DEFAULTS:
            near = find_closest(name, NAMES)
            fix = f"Did you mean {SECTION}.{near}?" if near else f"Choose one of {', '.join(NAMES)}."
            yield _problem(key, values, "no alarm has this name.", fix)
        elif not isinstance(values, DictConfig):
            action = values if values in get_args(Action) else "off"
            fix = f"Set {key}.action={action}{' to do without it' if action == 'off' else ''}."
            yield _problem(key, values, "its keys have no values.", fix, f"{key}={{action: '{action}'}}")
        else:
            found = [*KEYS[name].find_problems(config)] or [*_check_band(name, alarms[name])]
            yield from found or _find_pointless(name, alarms[name], spec, config)


def _is_measured(name: str, config: DictConfig) -> bool:
    """Return True if the run reports the metric on which the alarm is based."""
    return name not in OF_EXTENSIONS or isinstance(OmegaConf.select(config, OF_EXTENSIONS[name][0]), DictConfig)


def _problem(key: str, value: Any, reason: str, fix: str, *overrides: str) -> Problem:
    return Problem(key, value, reason, fix, parts=(), overrides=overrides)


def _read_values(config: DictConfig) -> dict[str, dict[str, Any]]:
    section = OmegaConf.select(config, SECTION)
    given: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else {}
    # A configuration without the section, for example in a test, has no alarms.
    names = DEFAULTS if given else {}
    values = {name: dict(defaults) for name, defaults in DEFAULTS.items() if name in names}
    for name in values:
        # Values that are not mappings are reported by find_problems.
        values[name] |= given[name] if isinstance(given.get(name), dict) else {}
    for alarm in values.values():
        # YAML reads an unquoted off as false.
        alarm["action"] = "off" if alarm["action"] is False else alarm["action"]
    return values


def _read_alarm(name: str, values: Mapping[str, Any]) -> AlarmSettings:
    fallback = values["fallback"]
    resolved = isinstance(fallback, Mapping)
    if values["action"] == "fallback" and not resolved:
        reason = "the fallback names options that main_offpolicy has not replaced with their values."
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


def _declare(name: str) -> Section:
    """Declare the keys of an alarm; an alarm on an extension's metric has no fallback."""
    fallback = None if name in OF_EXTENSIONS else ("action", "fallback")
    keys = {
        "action": Key(
            lambda value: value is False or value in get_args(Action), f"one of {', '.join(get_args(Action))}"
        ),
        **dict.fromkeys(_BOUNDS, number("a number, or null to leave the side open", null=True)),
        **dict.fromkeys(("patience", "recovery_patience"), count("a number of updates, 1 or more")),
        "fallback": Key(lambda value: True, "options of the group correction"),
        "return_after": count("a number of updates, 1 or more, or null for never", null=True, read_with=fallback),
        "window": count("a number of updates, 2 or more", 2),
        "least": number("a number of nats per token, above 0", above=0),
    }
    early = Rule(
        "return_after",
        lambda values: (
            values["action"] == "fallback" and (values["return_after"] or math.inf) < values["recovery_patience"]
        ),
        "the configured correction would return before the alarm has re-armed.",
        lambda values: values["recovery_patience"],
        "recovery_patience",
    )
    return Section(f"{SECTION}.{name}", DEFAULTS[name], {part: keys[part] for part in DEFAULTS[name]}, (early,))


KEYS = {name: _declare(name) for name in DEFAULTS}


def _check_band(name: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find bounds that cross, lie outside the range of the statistic, or do not fit the recovery bounds."""
    key = f"{SECTION}.{name}"
    shipped = tuple(set_to(f"{key}.{part}", DEFAULTS[name][part]) for part in _BOUNDS)

    def refuse(part: str, reason: str, fix: str = "", overrides: tuple[str, ...] = shipped) -> Problem:
        return _problem(f"{key}.{part}", values[part], reason, fix, *overrides)

    lower, upper = values["lower"], values["upper"]
    if lower is None and upper is None:
        yield refuse("lower", "with both sides open the alarm never fires.", f"Set a bound, or {key}.action=off.")
        return
    if lower is not None and upper is not None and lower > upper:
        yield refuse("lower", f"this is above {key}.upper={upper}, so the alarm fires at every value.")
        return
    least, greatest = RANGES[name]
    within = (
        f"the statistic is in [{least:g}, {greatest:g}]"
        if math.isfinite(greatest)
        else f"the statistic is >= {least:g}"
    )
    for side, never, always in (
        ("lower", lower is not None and lower <= least, lower is not None and lower > greatest),
        ("upper", upper is not None and upper >= greatest, upper is not None and upper < least),
    ):
        if never or always:
            happens = (
                "no value is beyond the bound, so the alarm never fires"
                if never
                else "every value is beyond the bound, so the alarm always fires"
            )
            yield refuse(side, f"{within}: {happens}.")
            return
    fit = True
    for side, sign in (("lower", 1.0), ("upper", -1.0)):
        bound, recovery = values[side], values[f"recovery_{side}"]
        if (bound is None) != (recovery is None):
            unset, given = (f"recovery_{side}", bound) if recovery is None else (side, recovery)
            fix = f"Set both, for example {key}.{unset}={given}, or neither."
            yield refuse(
                unset, f"{side} and recovery_{side} must be set together.", fix, (set_to(f"{key}.{unset}", given),)
            )
        elif bound is not None and sign * recovery < sign * bound:
            reason = f"this is looser than {key}.{side}={bound}, so the alarm would re-arm while it fires."
            override = set_to(f"{key}.recovery_{side}", bound)
            yield refuse(f"recovery_{side}", reason, f"Set {bound}, or a stricter bound.", (override,))
            fit = False
    low, high = values["recovery_lower"], values["recovery_upper"]
    if fit and low is not None and high is not None and low > high:
        yield refuse("recovery_lower", f"this is above {key}.recovery_upper={high}, so the alarm would never re-arm.")


def _find_pointless(
    name: str, values: Mapping[str, Any], spec: CorrectionSpec, config: DictConfig
) -> Iterator[Problem]:
    key, action, fallback = f"{SECTION}.{name}", values["action"], values["fallback"]
    given = fallback["options"] if isinstance(fallback, Mapping) else fallback
    if name in OF_EXTENSIONS:
        yield from _find_pointless_of_extension(name, {**values, "fallback": given}, config)
        return
    if action == "fallback" and not fallback:
        override = set_to(f"{key}.fallback", ["tis_token", "gsm"])
        yield _problem(f"{key}.fallback", fallback, "there is no correction to fall back to.", "", override)
    if action != "fallback" and fallback:
        reason, fix = f"the fallback is never used with action={action}.", f"Set {key}.action=fallback, or null."
        yield _problem(f"{key}.fallback", given, reason, fix, set_to(f"{key}.action", "fallback"))
    if action not in ("stop", "fallback"):
        return
    if spec.is_none and not OmegaConf.select(config, _MU):
        reason = "with correction=none and without rollout log-probs there is nothing to measure."
        fix = f"Set {_MU}=true, or {key}.action=off."
        yield _problem(f"{key}.action", action, reason, fix, set_to(_MU, True))
    elif reason := explain_constant(name, spec):
        yield _problem(f"{key}.action", action, reason, f"Set {key}.action=warn, or off.")


def _find_pointless_of_extension(name: str, values: Mapping[str, Any], config: DictConfig) -> Iterator[Problem]:
    key, action, section = f"{SECTION}.{name}", values["action"], OF_EXTENSIONS[name][0]
    reason = f"another correction does not change the metric of {section}."
    if action == "fallback":
        yield _problem(f"{key}.action", action, reason, f"Set {key}.action=warn, or stop.")
        return
    for part in ("fallback", "return_after"):
        if values[part] is not None:
            yield _problem(f"{key}.{part}", values[part], f"this alarm has no fallback: {reason}", "Set null.")
    if action == "stop" and not _is_measured(name, config):
        fix = f"Set {key}.action=warn, or off."
        yield _problem(f"{key}.action", action, f"with {section}=null there is nothing to measure.", fix)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


__all__ = ["DEFAULTS", "GROWTH", "SECTION", "AlarmSettings", "find_problems", "read_settings"]
