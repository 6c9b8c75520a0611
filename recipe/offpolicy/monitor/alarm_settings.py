"""The keys ``offpolicy.alarms``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

from omegaconf import DictConfig, OmegaConf

from ..batch.declared_keys import Key, Rule, Section, count, number, read_shipped_defaults
from ..correction import CorrectionSpec, Problem, SpecError
from ..correction.problem import find_closest, set_to
from ..correction.spec import format_bounds

Action = Literal["off", "warn", "stop", "fallback"]

SECTION = "offpolicy.alarms"
DEFAULTS: Final[Mapping[str, dict[str, Any]]] = read_shipped_defaults("alarms")
"""Alarms and their keys, in the order of their evaluation."""
UPPER_LIMITS: Final = {
    "ess": 1.0,
    "mean_weight": math.inf,
    "kept_share": 1.0,
    "nonfinite": math.inf,
    "mismatch_growth": math.inf,
    "opd_overlap": 1.0,
}
"""Largest possible value of each alarm's statistic; the smallest is 0."""
OF_EXTENSIONS: Final[Mapping[str, tuple[str, str]]] = {"opd_overlap": ("opd", "opd/gap/extreme_share")}
"""Alarm on an extension's metric -> the section that must be on, and the metric. Updates in which the metric is NaN do
not count."""
_BOUNDS = ("lower", "upper", "recovery_lower", "recovery_upper")
_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class Band:
    """A range with inclusive bounds; None means no bound on that side. NaN is outside every band."""

    lower: float | None
    upper: float | None

    def contains(self, value: float) -> bool:
        """Return True if ``value`` is inside."""
        least, most = -math.inf if self.lower is None else self.lower, math.inf if self.upper is None else self.upper
        return least <= value <= most

    def __str__(self) -> str:
        """Format as ``[0.5, 2]``."""
        return format_bounds(asdict(self))


@dataclass(frozen=True)
class AlarmSettings:
    """The configuration of one alarm.

    Attributes:
        band: accepted values.
        recovery: values that re-arm the alarm; a subset of ``band``.
        patience: number of consecutive updates outside ``band`` after which the alarm fires.
        recovery_patience: number of consecutive updates inside ``recovery`` after which the alarm re-arms.
        fallback: the fallback correction; None if the action is not ``fallback``.
        options: names of the options from which the fallback was composed.
        return_after: consecutive updates inside the recovery band after which the configured correction returns; None
            for never.
        window: number of updates whose median mismatch is the reference value for growth.
        least: mismatch, in nats per token, below which growth is ignored.
    """

    name: str
    action: Action
    band: Band
    recovery: Band
    patience: int
    recovery_patience: int
    fallback: CorrectionSpec | None
    options: tuple[str, ...]
    return_after: int | None
    window: int
    least: float

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields that determine when the alarm fires and what it does, as JSON values."""
        mapping = asdict(replace(self, fallback=None))
        del mapping["name"], mapping["options"]
        return mapping | {"fallback": self.fallback and self.fallback.to_mapping()}


def read_settings(config: DictConfig) -> dict[str, AlarmSettings]:
    """Return the enabled alarms, keyed by name; ``config`` must have passed ``find_problems``.

    An alarm on an extension's metric is off if the extension is off.
    """
    return {
        name: _read_alarm(name, values)
        for name, values in _read_values(config).items()
        if values["action"] != "off" and _is_measured(name, config)
    }


def _read_values(config: DictConfig) -> dict[str, dict[str, Any]]:
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig) or not section:  # as in tests
        return {}
    given: Any = OmegaConf.to_container(section, resolve=True)
    # Values that are not mappings are reported by find_problems.
    own = {name: values for name, values in given.items() if isinstance(values, dict)}
    merged = {name: defaults | own.get(name, {}) for name, defaults in DEFAULTS.items()}
    # YAML reads an unquoted off as false.
    return {name: each | {"action": each["action"] or "off"} for name, each in merged.items()}


def _read_alarm(name: str, values: Mapping[str, Any]) -> AlarmSettings:
    fallback = values["fallback"]
    resolved = isinstance(fallback, Mapping)
    if values["action"] == "fallback" and not resolved:
        reason = "the fallback names options that main_offpolicy has not replaced with their values."
        raise SpecError(reason, key=f"{SECTION}.{name}.fallback", value=fallback)
    lower, upper, low, high = (None if values[part] is None else float(values[part]) for part in _BOUNDS)
    return AlarmSettings(
        name,
        band=Band(lower, upper),
        recovery=Band(low, high),
        fallback=CorrectionSpec.from_mapping(fallback["correction"]) if resolved else None,
        options=tuple(fallback["options"]) if resolved else (),
        window=values.get("window", 0),
        least=values.get("least", 0.0),
        **{key: values[key] for key in ("action", "patience", "recovery_patience", "return_after")},
    )


def _is_measured(name: str, config: DictConfig) -> bool:
    """Return True if the run reports the metric on which the alarm is based."""
    return name not in OF_EXTENSIONS or isinstance(OmegaConf.select(config, OF_EXTENSIONS[name][0]), DictConfig)


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
            near = find_closest(name, DEFAULTS)
            fix = f"Did you mean {SECTION}.{near}?" if near else f"Choose one of {', '.join(DEFAULTS)}."
            yield _problem(key, values, "no alarm has this name.", fix)
        elif not isinstance(values, DictConfig):
            action = values if values in get_args(Action) else "off"
            fix = f"Set {key}.action={action}{' to do without it' if action == 'off' else ''}."
            yield _problem(key, values, "its keys have no values.", fix, f"{key}={{action: '{action}'}}")
        else:
            found = [*KEYS[name].find_problems(config)] or [*_check_bounds(name, alarms[name])]
            yield from found or _find_pointless(name, alarms[name], spec, config)


def _problem(key: str, value: Any, reason: str, fix: str, *overrides: str) -> Problem:
    return Problem(key, value, reason, fix, parts=(), overrides=overrides)


def _declare(name: str) -> Section:
    """Declare the keys of an alarm; an alarm on an extension's metric has no fallback."""
    fallback = None if name in OF_EXTENSIONS else ("action", "fallback")
    actions = get_args(Action)
    keys = {
        "action": Key(lambda value: value is False or value in actions, f"one of {', '.join(actions)}"),
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


def _check_bounds(name: str, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find bounds that cross, lie outside the range of the statistic, or do not fit the recovery bounds."""
    key, most = f"{SECTION}.{name}", UPPER_LIMITS[name]
    shipped = tuple(set_to(f"{key}.{part}", DEFAULTS[name][part]) for part in _BOUNDS)
    lower, upper, low, high = (values[part] for part in _BOUNDS)

    def refuse(part: str, reason: str, fix: str = "", overrides: tuple[str, ...] = shipped) -> Problem:
        return _problem(f"{key}.{part}", values[part], reason, fix, *overrides)

    if lower is None and upper is None:
        yield refuse("lower", "with both sides open the alarm never fires.", f"Set a bound, or {key}.action=off.")
        return
    if None not in (lower, upper) and lower > upper:
        yield refuse("lower", f"this is above {key}.upper={upper}, so the alarm fires at every value.")
        return
    acts = {"lower": lower is None or 0 < lower <= most, "upper": upper is None or 0 <= upper < most}
    if wrong := [side for side, can_act in acts.items() if not can_act]:
        yield refuse(wrong[0], f"the statistic is in [0, {most:g}], so the alarm would always or never fire.")
        return
    fit = True
    for side, sign in (("lower", 1.0), ("upper", -1.0)):
        bound, recovery = values[side], values[f"recovery_{side}"]
        if (bound is None) != (recovery is None):
            unset, given = (f"recovery_{side}", bound) if recovery is None else (side, recovery)
            override = set_to(f"{key}.{unset}", given)
            reason = f"{side} and recovery_{side} must be set together."
            yield refuse(unset, reason, f"Set both, for example {override}, or neither.", (override,))
        elif bound is not None and sign * recovery < sign * bound:
            reason = f"this is looser than {key}.{side}={bound}, so the alarm would re-arm while it fires."
            override = set_to(f"{key}.recovery_{side}", bound)
            yield refuse(f"recovery_{side}", reason, f"Set {bound}, or a stricter bound.", (override,))
            fit = False
    if fit and None not in (low, high) and low > high:
        yield refuse("recovery_lower", f"this is above {key}.recovery_upper={high}, so the alarm would never re-arm.")


def _find_pointless(
    name: str, values: Mapping[str, Any], spec: CorrectionSpec, config: DictConfig
) -> Iterator[Problem]:
    """Find actions and fallbacks that would have no effect."""
    key, action, fallback = f"{SECTION}.{name}", values["action"], values["fallback"]
    given = fallback["options"] if isinstance(fallback, Mapping) else fallback
    if name in OF_EXTENSIONS:
        section = OF_EXTENSIONS[name][0]
        reason = f"another correction does not change the metric of {section}."
        if action == "fallback":
            yield _problem(f"{key}.action", action, reason, f"Set {key}.action=warn, or stop.")
            return
        for part, value in {"fallback": given, "return_after": values["return_after"]}.items():
            if value is not None:
                yield _problem(f"{key}.{part}", value, f"this alarm has no fallback: {reason}", "Set null.")
        if action == "stop" and not _is_measured(name, config):
            reason = f"with {section}=null there is nothing to measure."
            yield _problem(f"{key}.action", action, reason, f"Set {key}.action=warn, or off.")
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
    elif name == "kept_share" and not spec.masks and not spec.weight_rejects:
        reason = "the correction has no mask and no weight that rejects, so everything is kept."
        yield _problem(f"{key}.action", action, reason, f"Set {key}.action=warn, or off.")
