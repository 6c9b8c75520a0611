"""Parsing and validation of the keys ``offpolicy.calibrate``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf

from ...batch.shipped_defaults import read_shipped_defaults
from ...correction import CorrectionSpec, MaskSpec, Problem
from ...correction.moving_bounds import WEIGHT, Side
from ...correction.problem import format_value, remove, set_to
from ...correction.proximal import MU_ITSELF
from ...correction.spelling import find_closest
from .histogram import find_keeping_distance, find_widest_cap
from .schedule import Schedule, compute_distances, find_moving_sides

SECTION = "offpolicy.calibrate"
DEFAULTS: Final = read_shipped_defaults("calibrate")
_COUNTS: Final = {"every": 1, "window": 1, "warmup": 0}
_PACE: Final = ("rate", "floor", "ceiling")
_OF_MASKS: Final = ("of", "side", "noise_kept")
_DISTANCE: Final = "a multiple of the configured bound's distance from agreement"
_RANGES: Final[dict[str, tuple[Callable[[float], bool], str]]] = {
    "target_kept": (lambda x: 0.5 <= x < 1, "a share of what a mask looks at, from 0.5 to below 1."),
    "target_ess": (lambda x: 0 < x < 1, "an effective sample size as a share of the weights, above 0 and below 1."),
    "rate": (lambda x: 0 < x <= 1, "a factor less one, above 0 and at most 1."),
    "floor": (lambda x: 0 < x <= 1, f"{_DISTANCE}, above 0 and at most 1."),
    "ceiling": (lambda x: 1 <= x < math.inf, f"{_DISTANCE}, 1 or more."),
    "noise_kept": (lambda x: 0.5 <= x < 1, "a share of rows, from 0.5 to below 1."),
}
_TARGETS: Final = {"target_kept": 0.98, "target_ess": 0.9}
"""Keys that switch calibration on -> the value that a message proposes."""


@dataclass(frozen=True)
class Settings:
    """Calibrated parts, their targets, and the pace of calibration.

    Attributes:
        schedules: by name of a mask, or ``WEIGHT``, for the parts whose bounds move.
        every: updates between two changes.
        window: the latest updates that a change looks at.
        warmup: updates before the first change.
    """

    schedules: Mapping[str, Schedule]
    every: int
    window: int
    warmup: int

    @property
    def moving(self) -> dict[str, Side]:
        """Parts whose bounds come with each update, and the sides that move."""
        return {name: schedule.side for name, schedule in self.schedules.items()}


def read_settings(config: DictConfig, spec: CorrectionSpec) -> Settings | None:
    """Read the settings of a configuration without problems; None where nothing is calibrated."""
    values = _read_values(config)
    if not _is_on(values):
        return None
    pace = {name: float(values[name]) for name in _PACE}
    schedules = {}
    for name in _choose_masks(values, spec):
        target, noise_kept = float(values["target_kept"]), float(values["noise_kept"])
        schedules[name] = Schedule(find_keeping_distance, target, values["side"], noise_kept=noise_kept, **pace)
    if values["target_ess"] is not None:
        schedules[WEIGHT] = Schedule(find_widest_cap, float(values["target_ess"]), "upper", noise_kept=None, **pace)
    return Settings(schedules, **{name: int(values[name]) for name in _COUNTS})


def read_noted_keys(config: DictConfig) -> dict[str, Any]:
    """Read the keys as a checkpoint notes them; where nothing is calibrated, the one that says so."""
    values = _read_values(config)
    if not _is_on(values):
        return {"target_kept": None}
    noted = values | {"of": _list_names(values["of"]) or None}
    # A target that is not set is not noted, so that checkpoints from before there was one go on.
    return {key: value for key, value in noted.items() if (key, value) != ("target_ess", None)}


def find_problems(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find the problems of the keys ``offpolicy.calibrate`` beside the correction ``spec``."""
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig):
        yield Problem(SECTION, section, "its keys have no values.", "Remove this override.", parts=())
        return
    for name in map(str, section):
        if name not in DEFAULTS:
            key, given = f"{SECTION}.{name}", section[name]
            near = find_closest(name, DEFAULTS)
            moved = (*remove(key, given), set_to(f"{SECTION}.{near}", given)) if near else ()
            fix = f"Did you mean {SECTION}.{near}?" if near else f"Known under {SECTION}: {', '.join(DEFAULTS)}."
            yield Problem(key, given, "unknown key.", fix, parts=(), overrides=moved)
    values = _read_values(config)
    if wrong := list(_find_malformed(values)):
        yield from wrong
        return
    yield from _find_unread(values)
    if values["target_kept"] is not None:
        yield from _find_immovable_masks(values, spec)
    if values["target_ess"] is not None:
        for reason, fix in _find_immovable_cap(spec, _choose_masks(values, spec)):
            fix = f"Set {SECTION}.target_ess=null, or {fix}."
            yield Problem(f"{SECTION}.target_ess", values["target_ess"], reason, fix, parts=())


def _problem(name: str, value: Any, reason: str, fix: str = "", **mend: Any) -> Problem:
    """Build a problem of one key; ``mend`` holds the keys of the section that mend it, by default what is shipped."""
    mend = {name: DEFAULTS[name]} if not mend and DEFAULTS[name] is not None else mend
    overrides = tuple(set_to(f"{SECTION}.{key}", wanted) for key, wanted in mend.items())
    return Problem(f"{SECTION}.{name}", value, reason, fix, parts=(), overrides=overrides)


def _find_unread(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Find keys that are set and that nothing reads, because no target, or none of masks, is set."""
    if values["target_kept"] is not None:
        return
    needed = "target_kept" if _is_on(values) else "target_kept or target_ess"
    for name in _OF_MASKS if _is_on(values) else (*_OF_MASKS, *_COUNTS, *_PACE):
        if values[name] != DEFAULTS[name]:
            reason = f"nothing reads it without {SECTION}.{needed}."
            fix = f"Set {SECTION}.target_kept=0.98 for example, or {SECTION}.{name}={format_value(DEFAULTS[name])}."
            yield _problem(name, values[name], reason, fix)


def _find_malformed(values: Mapping[str, Any]) -> Iterator[Problem]:
    for name, proposed in _TARGETS.items():
        if values[name] is not None and not _is_in_range(name, values[name]):
            fix = f"Set {proposed}, or null."
            yield _problem(name, values[name], _RANGES[name][1], fix, **{name: proposed})
    if values["side"] not in get_args(Side):
        yield _problem("side", values["side"], "no side of a band.", f"Set one of {', '.join(get_args(Side))}.")
    if not isinstance(values["of"], str | ListConfig | list | None):
        fix = f"Set {SECTION}.of=[gsm] for example, or null for the one there is."
        yield _problem("of", values["of"], "not a list of masks.", fix, of=None)
    for name, least in _COUNTS.items():
        if isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < least:
            yield _problem(name, values[name], f"a count of updates, a whole number of at least {least}.")
    for name in (*_PACE, "noise_kept"):
        if not _is_in_range(name, values[name]):
            yield _problem(name, values[name], _RANGES[name][1])


def _find_immovable_masks(values: Mapping[str, Any], spec: CorrectionSpec) -> Iterator[Problem]:
    of, target, kept = f"{SECTION}.of", f"{SECTION}.target_kept", values["target_kept"]
    masks, movable = dict(spec.masks), _list_movable(spec, values["side"])
    names = _list_names(values["of"])
    if not masks:
        fix = f"Set {target}=null; {SECTION}.target_ess moves the cap of a weight."
        yield _problem("target_kept", kept, "the correction has no mask whose bounds could move.", fix)
        return
    if spec.skyrl_compat:
        reason = "correction.skyrl_compat=true lets one mask decide what another sees, so that no share is its own."
        yield _problem("target_kept", kept, reason, f"Set {target}=null, or correction.skyrl_compat=false.")
    first: dict[str, Any] = {"of": movable[:1]} if len(movable) == 1 else {}
    if not names and len(movable) != 1:
        reason = f"{len(movable)} masks have bounds that could move: {', '.join(movable) or 'none'}."
        fix = f"Set {of}=[{movable[0]}] for example." if movable else f"Set {target}=null."
        yield _problem("of", None, reason, fix, **first)
    for name in names or movable:
        if name not in masks:
            yield _problem("of", name, "no mask of the correction.", f"Choose of {', '.join(masks)}.", **first)
        elif name not in movable:
            fix = f"Choose of {', '.join(movable)}." if movable else f"Set {target}=null."
            yield _problem("of", name, _explain_immovable(masks[name], values["side"]), fix, **first)
        elif masks[name].ratio == "full" and spec.proximal in (*MU_ITSELF, "loglinear"):
            reason = (
                f"with correction.proximal={spec.proximal} nothing tells backend noise from drift, and the bound must "
                f"not get below it."
            )
            fix = f"Set {target}=null, or correction.proximal=recompute."
            yield _problem("of", name, reason, fix)


def _find_immovable_cap(spec: CorrectionSpec, masks: list[str]) -> Iterator[tuple[str, str]]:
    """Find why the cap of the weight cannot follow an ESS, with what would clear it; ``masks`` move as well.

    ``normalize`` is no reason: it divides all weights by one number, after the cap, which leaves the ESS as it is.
    """
    weight, key = spec.weight, "correction.weight"
    if spec.weights:
        yield "correction.weights have a cap each, and an ESS is that of one weight.", "give one correction.weight"
        return
    if weight is None:
        option = "stack a weight that truncates, such as correction=[tis_token,gsm]"
        yield f"{key}=null: there is no cap that could move.", option
        return
    if weight.by_staleness is not None:
        reason = f"{key}.by_staleness={format_value(list(weight.by_staleness))} gives each age a cap of its own."
        yield reason, f"{key}.by_staleness=null"
    if weight.kind == "reject":
        yield f"{key}.kind=reject drops what lies beyond its bounds, and has no cap.", f"{key}.kind=truncate"
    elif weight.upper is None:
        yield f"{key}.upper=null: there is no cap that could move.", f"give {key}.upper"
    elif weight.upper <= 1:
        reason = "a cap moves by factors of its distance from 1, and lies above."
        yield f"{key}.upper={weight.upper:g}: {reason}", f"{key}.upper=2.0"
    if weight.kind != "reject" and weight.lower is not None and weight.lower >= 1:
        yield f"{key}.lower={weight.lower:g}: the cap comes near to 1, and would cross it.", f"{key}.lower=0.5"
    if spec.skyrl_compat and weight.level != "token":
        reason = f"correction.skyrl_compat=true lets masks decide what a weight of level {weight.level} sees."
        yield reason, "correction.skyrl_compat=false"
    if "weight" in masks:
        reason = "the bounds of correction.masks.weight move too, and both would be offpolicy/calibrate/weight."
        yield reason, "rename the mask"


def _explain_immovable(mask: MaskSpec, side: Side) -> str:
    if mask.budget is not None:
        return "budget is cut by batch, and no bound stands still between two batches."
    if mask.entry.of_age:
        return "an age is counted in whole versions, which no factor moves."
    if mask.by_staleness is not None:
        return "by_staleness gives each age a bound of its own, and distances are measured from one."
    zero = [name for name, distance in compute_distances(mask).items() if distance == 0]
    at = f" ({' and '.join(zero)} is at agreement, and moves by factors)" if zero else ""
    return f"it has no bound that could move with side={side}{at}."


def _list_movable(spec: CorrectionSpec, side: Side) -> list[str]:
    movable = [
        (name, mask) for name, mask in spec.masks if mask.budget is None and f"masks.{name}" not in spec.age_parts
    ]
    return [name for name, mask in movable if find_moving_sides(mask, side)]


def _choose_masks(values: Mapping[str, Any], spec: CorrectionSpec) -> list[str]:
    if values["target_kept"] is None:
        return []
    return sorted(_list_names(values["of"])) or _list_movable(spec, values["side"])


def _read_values(config: DictConfig) -> dict[str, Any]:
    section: Any = OmegaConf.select(config, SECTION)
    return DEFAULTS | (dict(section) if isinstance(section, DictConfig) else {})


def _is_on(values: Mapping[str, Any]) -> bool:
    return any(values[target] is not None for target in _TARGETS)


def _list_names(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(name) for name in value]


def _is_in_range(name: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and _RANGES[name][0](value)
