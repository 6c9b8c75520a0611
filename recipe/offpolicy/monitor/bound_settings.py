"""Parsing and validation of the keys ``offpolicy.calibrate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, OmegaConf

from ..batch.declared_keys import Key, Rule, Section, choice, count, number, read_shipped_defaults
from ..correction import CorrectionSpec, MaskSpec, Problem
from ..correction.correction_parts import MU_ITSELF
from ..correction.problem import format_value, set_to
from ..correction.spec import WEIGHT, Side
from .moving_bounds import Schedule, compute_distances, find_keeping_distance, find_moving_sides, find_widest_cap

SECTION = "offpolicy.calibrate"
DEFAULTS: Final = read_shipped_defaults("calibrate")
_COUNTS: Final = ("every", "window", "warmup")
_PACE: Final = ("rate", "floor", "ceiling")
_TARGETS: Final = {"target_kept": 0.98, "target_ess": 0.9}
"""Keys that enable calibration -> a value to suggest in messages."""


@dataclass(frozen=True)
class Settings:
    """Calibrated parts, their targets, and how often and how fast bounds change.

    Attributes:
        schedules: schedules by name of a mask, or ``WEIGHT``, for the parts whose bounds move.
        every: number of updates from one change of the bounds to the next.
        window: number of most recent updates on which a change is based.
        warmup: number of updates before the first change.
    """

    schedules: Mapping[str, Schedule]
    every: int
    window: int
    warmup: int

    @property
    def moving(self) -> dict[str, Side]:
        """Parts whose bounds are sent with each update, and the sides that move."""
        return {name: schedule.side for name, schedule in self.schedules.items()}


def read_settings(config: DictConfig, spec: CorrectionSpec) -> Settings:
    """Read the settings of a configuration without problems; there is no schedule if nothing is calibrated."""
    values = _read_values(config)
    pace = {name: float(values[name]) for name in _PACE}
    schedules = {}
    for name in _choose_masks(values, spec):
        target, noise_kept = float(values["target_kept"]), float(values["noise_kept"])
        schedules[name] = Schedule(find_keeping_distance, target, values["side"], noise_kept=noise_kept, **pace)
    if values["target_ess"] is not None:
        schedules[WEIGHT] = Schedule(find_widest_cap, float(values["target_ess"]), "upper", noise_kept=None, **pace)
    return Settings(schedules, **{name: int(values[name]) for name in _COUNTS})


def read_noted_keys(config: DictConfig) -> dict[str, Any]:
    """Read the keys that a checkpoint records; if nothing is calibrated, read only the key that says so."""
    values = _read_values(config)
    if not _is_on(values):
        return {"target_kept": None}
    noted = values | {"of": _list_names(values["of"]) or None}
    # A target that is not set is not recorded, so that checkpoints written before this key existed can be resumed.
    return {key: value for key, value in noted.items() if (key, value) != ("target_ess", None)}


def find_problems(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find the problems of the keys ``offpolicy.calibrate`` together with the correction ``spec``."""
    if OmegaConf.select(config, SECTION) is None:
        yield _problem("", None, "the section is null, so its keys have no values.", "Remove this override.")
        return
    if found := list(KEYS.find_problems(config)):
        yield from found
        return
    values = _read_values(config)
    if values["target_kept"] is not None:
        yield from _find_immovable_masks(values, spec)
    if values["target_ess"] is not None:
        for reason, fix in _find_immovable_cap(spec, _choose_masks(values, spec)):
            fix = f"Set {SECTION}.target_ess=null, or {fix}."
            yield _problem(".target_ess", values["target_ess"], reason, fix)


def _problem(key: str, value: Any, reason: str, fix: str, *overrides: str) -> Problem:
    return Problem(f"{SECTION}{key}", value, reason, fix, parts=(), overrides=overrides)


_MASKS = ("target_kept", ...)
_DISTANCE = "a multiple of the configured |log bound|"


def _build_rule(name: str) -> Rule:
    """Build the rule that reports this key as unused if no target is set."""
    return Rule(
        name,
        lambda values: not _is_on(values) and values[name] != DEFAULTS[name],
        "this key is unused without target_kept or target_ess.",
        lambda values: DEFAULTS[name],
        "target_kept",
    )


KEYS = Section(
    SECTION,
    DEFAULTS,
    {
        "target_kept": number("a share of a mask's units, in [0.5, 1), or null", 0.5, below=1, null=True),
        "target_ess": number("an effective sample size in (0, 1), or null", above=0, below=1, null=True),
        "of": Key(
            lambda value: value is None or isinstance(value, str | list),
            "a list of masks such as [gsm], or null for the only mask",
            _MASKS,
        ),
        "side": choice(*get_args(Side), read_with=_MASKS),
        "every": count("a number of updates, 1 or more"),
        "window": count("a number of updates, 1 or more"),
        "warmup": count("a number of updates, 0 or more", 0),
        "rate": number("a relative change in (0, 1]", above=0, most=1),
        "floor": number(f"{_DISTANCE}, in (0, 1]", above=0, most=1),
        "ceiling": number(f"{_DISTANCE}, 1 or more", 1),
        "noise_kept": number("a share of sequences, in [0.5, 1)", 0.5, below=1, read_with=_MASKS),
    },
    tuple(map(_build_rule, (*_COUNTS, *_PACE))),
    _TARGETS,
)


def _find_immovable_masks(values: Mapping[str, Any], spec: CorrectionSpec) -> Iterator[Problem]:
    masks, movable, names = dict(spec.masks), _list_movable(spec, values["side"]), _list_names(values["of"])
    of, off = f"{SECTION}.of", f"Set {SECTION}.target_kept=null"
    if not masks:
        reason = "the correction has no mask whose bounds could move."
        yield _problem(".target_kept", values["target_kept"], reason, f"{off}; {SECTION}.target_ess moves a cap.")
        return
    if spec.skyrl_compat:
        reason = (
            "correction.skyrl_compat=true applies masks one after another, so the kept share of a single mask is "
            "not defined."
        )
        yield _problem(".target_kept", values["target_kept"], reason, f"{off}, or correction.skyrl_compat=false.")
    first = (set_to(of, movable),) if len(movable) == 1 else ()
    if not names and len(movable) != 1:
        reason = f"{len(movable)} masks have bounds that could move: {', '.join(movable) or 'none'}."
        yield _problem(".of", None, reason, f"Set {of}=[{movable[0]}] for example." if movable else f"{off}.")
    for name in names or movable:
        if name not in movable:
            mask, fix = masks.get(name), f"Choose one of {', '.join(movable)}." if movable else f"{off}."
            reason = _explain_immovable(mask, values["side"]) if mask else "the correction has no mask of this name."
            yield _problem(".of", name, reason, fix, *first)
        elif masks[name].ratio == "full" and spec.proximal in (*MU_ITSELF, "loglinear"):
            reason = (
                f"with correction.proximal={spec.proximal} backend noise cannot be distinguished from drift, but the "
                "bound must not fall below the noise."
            )
            yield _problem(".of", name, reason, f"{off}, or correction.proximal=recompute.")


def _find_immovable_cap(spec: CorrectionSpec, masks: list[str]) -> Iterator[tuple[str, str]]:
    """Yield why the weight's cap cannot be moved to reach an ESS, and the fix; ``masks``: masks whose bounds also move.

    ``normalize`` is allowed, because it divides all weights by one number after the cap, which does not change the ESS.
    """
    weight, key = spec.weight, "correction.weight"
    if spec.weights:
        reason = "each of correction.weights has its own cap, but an ESS belongs to a single weight."
        yield reason, "set a single correction.weight"
        return
    if weight is None:
        option = "stack a weight that truncates, such as correction=[tis_token,gsm]"
        yield f"{key}=null: there is no cap that could move.", option
        return
    for name, each in {"by_staleness": "age", "by_position": "position"}.items():
        if (given := getattr(weight, name)) is not None:
            shown = format_value(list(given) if isinstance(given, tuple) else given)
            yield f"{key}.{name}={shown} gives each {each} its own cap.", f"{key}.{name}=null"
    if weight.kind == "reject":
        yield f"{key}.kind=reject drops values beyond its bounds, and has no cap.", f"{key}.kind=truncate"
    elif weight.upper is None:
        yield f"{key}.upper=null: there is no cap that could move.", f"set {key}.upper"
    elif weight.upper <= 1:
        reason = "a cap is moved by multiplying its distance from 1, so it must be above 1."
        yield f"{key}.upper={weight.upper:g}: {reason}", f"{key}.upper=2.0"
    if weight.kind != "reject" and weight.lower is not None and weight.lower >= 1:
        reason = "the cap may come close to 1 and cross this lower bound."
        yield f"{key}.lower={weight.lower:g}: {reason}", f"{key}.lower=0.5"
    if spec.skyrl_compat and weight.level != "token":
        reason = f"correction.skyrl_compat=true applies masks before a weight of level {weight.level}."
        yield reason, "correction.skyrl_compat=false"
    if "weight" in masks:
        reason = "the bounds of correction.masks.weight move too, and both metrics would be named "
        yield f"{reason}offpolicy/calibrate/weight.", "rename the mask"


def _explain_immovable(mask: MaskSpec, side: Side) -> str:
    if mask.budget is not None:
        return "budget computes a cutoff per batch, so there is no fixed bound to move."
    if mask.entry.of_age:
        return "an age is a whole number of versions, so it cannot be moved by a factor."
    for name, each in {"by_staleness": "age", "by_position": "position"}.items():
        if getattr(mask, name) is not None:
            return f"{name} gives each {each} its own bound, but distances are measured from a single bound."
    zero = [name for name, distance in compute_distances(mask).items() if distance == 0]
    at = f" ({' and '.join(zero)} is at the point of agreement, so a factor cannot move it)" if zero else ""
    return f"the mask has no bound that could move with side={side}{at}."


def _list_movable(spec: CorrectionSpec, side: Side) -> list[str]:
    def moves(name: str, mask: MaskSpec) -> bool:
        of_one_bound = mask.budget is None and mask.by_position is None and f"masks.{name}" not in spec.age_parts
        return of_one_bound and bool(find_moving_sides(mask, side))

    return [name for name, mask in spec.masks if moves(name, mask)]


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
