"""The keys of ``offpolicy.alarms``: read once, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, OmegaConf

from ..correction import CorrectionSpec, SpecError
from ..forward_passes import correction_of
from .alarm import Action, Band, Rule
from .watched import GROWTH, NAMES, never_moves

SECTION = "offpolicy.alarms"
_COMMON: Final[dict[str, Any]] = {
    "action": "warn",
    "lower": None,
    "upper": None,
    "patience": 3,
    "recovery_lower": None,
    "recovery_upper": None,
    "recovery_patience": 3,
    "fallback": None,
    "return_after": None,
}
DEFAULTS: Final[Mapping[str, dict[str, Any]]] = {
    "ess": _COMMON | {"lower": 0.3, "recovery_lower": 0.4},
    "mean_weight": _COMMON | {"lower": 0.5, "upper": 2.0, "recovery_lower": 0.6, "recovery_upper": 1.7},
    "kept_share": _COMMON | {"lower": 0.5, "recovery_lower": 0.6},
    "nonfinite": _COMMON | {"upper": 0.0, "recovery_upper": 0.0, "patience": 1},
    "mismatch_growth": _COMMON | {"upper": 5.0, "recovery_upper": 2.5, "window": 16, "least": 1e-4},
}
"""Alarms and their keys, in the order in which they are judged."""

Finding = tuple[str, object, str, str]
"""Key, value, what is wrong, and the fix."""


@dataclass(frozen=True)
class Settings:
    """One alarm as it is configured.

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
    rule: Rule
    fallback: CorrectionSpec | None
    options: tuple[str, ...]
    return_after: int | None
    window: int
    least: float

    def plain(self) -> dict[str, Any]:
        """What decides when it fires and what then happens, in values as JSON has them."""
        fallback = None if self.fallback is None else self.fallback.to_mapping()
        return asdict(self.rule) | {
            "action": self.action,
            "fallback": fallback,
            "return_after": self.return_after,
            "window": self.window,
            "least": self.least,
        }


def settings_of(config: DictConfig) -> dict[str, Settings]:
    """The alarms of a configuration without ``problems`` that are not off, by name."""
    return {name: _one(name, values) for name, values in _values(config).items() if values["action"] != "off"}


def problems(config: DictConfig) -> Iterator[Finding]:
    """What is wrong with ``offpolicy.alarms``, in a configuration whose correction is well formed."""
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig):
        yield SECTION, section, "its keys have no values.", "Remove this override."
        return
    for name in map(str, section):
        key, values = f"{SECTION}.{name}", section[name]
        if name not in DEFAULTS:
            yield key, values, "no alarm has this name.", f"Choose of {', '.join(NAMES)}."
        elif not isinstance(values, DictConfig):
            yield key, values, "its keys have no values.", f"Set {key}.action=off to do without it."
        else:
            for unknown in sorted(set(map(str, values)) - set(DEFAULTS[name])):
                yield f"{key}.{unknown}", values[unknown], "unknown key.", f"Remove {key}.{unknown}."
    spec = CorrectionSpec.from_mapping(correction_of(config))
    for name, alarm in _values(config).items():
        found = list(_malformed(name, alarm))
        yield from found or _pointless(name, alarm, spec, config)


def _values(config: DictConfig) -> dict[str, dict[str, Any]]:
    section = OmegaConf.select(config, SECTION)
    given: Any = OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else {}
    # A configuration without the section, as of a test of something else, has no alarms.
    names = DEFAULTS if given else {}
    values = {name: defaults | (given.get(name) or {}) for name, defaults in DEFAULTS.items() if name in names}
    for alarm in values.values():
        # YAML reads a bare off as false.
        alarm["action"] = "off" if alarm["action"] is False else alarm["action"]
    return values


def _one(name: str, values: Mapping[str, Any]) -> Settings:
    fallback = values["fallback"]
    resolved = isinstance(fallback, Mapping)
    if values["action"] == "fallback" and not resolved:
        raise SpecError(
            f"{SECTION}.{name}.fallback={fallback}: names, that main_offpolicy has not replaced by what they mean."
        )
    return Settings(
        name=name,
        action=values["action"],
        rule=Rule(
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


def _malformed(name: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    def key(part: str) -> str:
        return f"{SECTION}.{name}.{part}"

    if values["action"] not in get_args(Action):
        yield key("action"), values["action"], "no action.", f"Set one of {', '.join(get_args(Action))}."
    for part in ("lower", "upper", "recovery_lower", "recovery_upper"):
        if values[part] is not None and not _is_number(values[part]):
            yield key(part), values[part], "not a number.", "Set one, or null to leave the side open."
            return
    for part, least in (("patience", 1), ("recovery_patience", 1), ("window", 2), ("return_after", 1)):
        if part in values and not (part == "return_after" and values[part] is None):
            value = values[part]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield key(part), value, f"a count of updates, a whole number of at least {least}.", "Set one."
                return
    if "least" in values and not (_is_number(values["least"]) and values["least"] > 0):
        yield key("least"), values["least"], "nats a token, a number > 0.", f"Set {DEFAULTS[name]['least']}."
    lower, upper = values["lower"], values["upper"]
    if lower is None and upper is None:
        yield key("lower"), None, "with both sides open it never fires.", f"Set a bound, or {key('action')}=off."
    elif lower is not None and upper is not None and lower > upper:
        yield key("lower"), lower, f"above {key('upper')}={upper}, so that every value is beyond.", "Swap them."
    for side, sign in (("lower", 1.0), ("upper", -1.0)):
        bound, recovery = values[side], values[f"recovery_{side}"]
        if (bound is None) != (recovery is None):
            unset = f"recovery_{side}" if recovery is None else side
            yield key(unset), None, f"{side} and recovery_{side} go together.", "Set both, or neither."
        elif bound is not None and sign * recovery < sign * bound:
            reason = f"looser than {key(side)}={bound}: it would re-arm while it fires."
            yield key(f"recovery_{side}"), recovery, reason, f"Set {bound}, or a stricter one."
    back = values["return_after"]
    if back is not None and back < values["recovery_patience"]:
        reason = (
            f"before the alarm has re-armed, after {key('recovery_patience')}={values['recovery_patience']} updates."
        )
        yield key("return_after"), back, reason, f"Set {values['recovery_patience']} or more."


def _pointless(name: str, values: Mapping[str, Any], spec: CorrectionSpec, config: DictConfig) -> Iterator[Finding]:
    key, action = f"{SECTION}.{name}", values["action"]
    if action == "fallback" and not values["fallback"]:
        yield f"{key}.fallback", values["fallback"], "nothing to fall back to.", f"Set {key}.fallback=[tis_token,gsm]."
    if action != "fallback" and values["fallback"]:
        names = values["fallback"]
        shown = names["options"] if isinstance(names, Mapping) else names
        yield f"{key}.fallback", shown, f"never taken with action={action}.", f"Set {key}.action=fallback, or null."
    if values["return_after"] is not None and action != "fallback":
        reason = f"nothing to return from with action={action}."
        yield f"{key}.return_after", values["return_after"], reason, f"Set {key}.action=fallback, or null."
    if action not in ("stop", "fallback"):
        return
    measured = OmegaConf.select(config, "actor_rollout_ref.rollout.calculate_log_probs")
    if spec.is_none and not measured:
        reason = "with correction=none and no rollout log-probs there is nothing to measure."
        fix = f"Set actor_rollout_ref.rollout.calculate_log_probs=true, or {key}.action=off."
        yield f"{key}.action", action, reason, fix
    elif reason := never_moves(name, spec):
        yield f"{key}.action", action, reason, f"Set {key}.action=warn, or off."


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


__all__ = ["DEFAULTS", "GROWTH", "SECTION", "Settings", "problems", "settings_of"]
