"""Parsing and validation of the keys ``offpolicy.calibrate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, OmegaConf

from ...batch.declared_keys import Key, Rule, Section, choice, count, number, read_shipped_defaults
from ...correction import CorrectionSpec, MaskSpec, Problem
from ...correction.bounds import WEIGHT, Side
from ...correction.problem import format_value, set_to
from ...correction.proximal import MU_ITSELF
from .histogram import Schedule, compute_distances, find_keeping_distance, find_moving_sides, find_widest_cap

SECTION = "offpolicy.calibrate"
DEFAULTS: Final = read_shipped_defaults("calibrate")
_COUNTS: Final = ("every", "window", "warmup")
_PACE: Final = ("rate", "floor", "ceiling")
_TARGETS: Final = {"target_kept": 0.98, "target_ess": 0.9}
"""Keys that enable calibration -> a value to suggest in messages."""


@dataclass(frozen=True)
class Settings:
    """Calibrated parts, their targets, and how often and how fast bounds are changed.

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


def read_settings(config: DictConfig, spec: CorrectionSpec) -> Settings | None:
    """Read the settings of a configuration without problems; None if nothing is calibrated."""
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
    """Read the keys that a checkpoint records; if nothing is calibrated, read only the key that shows that."""
    values = _read_values(config)
    if not _is_on(values):
        return {"target_kept": None}
    noted = values | {"of": _list_names(values["of"]) or None}
    # A target that is not set is not recorded, so that checkpoints written before this key existed can be resumed.
    return {key: value for key, value in noted.items() if (key, value) != ("target_ess", None)}


def find_problems(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find the problems of the keys ``offpolicy.calibrate`` together with the correction ``spec``."""
    if OmegaConf.select(config, SECTION) is None:
        yield Problem(
            SECTION, None, "the section is null, so its keys have no values.", "Remove this override.", parts=()
        )
        return
    found = list(KEYS.find_problems(config))
    yield from found
    if found:
        return
    values = _read_values(config)
    if values["target_kept"] is not None:
        yield from _find_immovable_masks(values, spec)
    if values["target_ess"] is not None:
        for reason, fix in _find_immovable_cap(spec, _choose_masks(values, spec)):
            fix = f"Set {SECTION}.target_ess=null, or {fix}."
            yield Problem(f"{SECTION}.target_ess", values["target_ess"], reason, fix, parts=())


_MASKS = ("target_kept", ...)
_DISTANCE = "a multiple of the configured bound's distance from agreement"


def _build_rule(name: str) -> Rule:
    """Build the rule that reports the key with this name as unused if no target is set."""
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
        "target_kept": number("a share of the units of a mask, in [0.5, 1), or null", 0.5, below=1, null=True),
        "target_ess": number("an effective sample size in (0, 1), or null", above=0, below=1, null=True),
        "of": Key(
            lambda value: value is None or isinstance(value, str | list),
            "a list of masks such as [gsm], or null for the only one",
            _MASKS,
        ),
        "side": choice(*get_args(Side), read_with=_MASKS),
        "every": count("a number of updates, 1 or more"),
        "window": count("a number of updates, 1 or more"),
        "warmup": count("a number of updates, 0 or more", 0),
        "rate": number("a factor minus one, in (0, 1]", above=0, most=1),
        "floor": number(f"{_DISTANCE}, in (0, 1]", above=0, most=1),
        "ceiling": number(f"{_DISTANCE}, 1 or more", 1),
        "noise_kept": number("a share of rows, in [0.5, 1)", 0.5, below=1, read_with=_MASKS),
    },
    tuple(map(_build_rule, (*_COUNTS, *_PACE))),
    _TARGETS,
)


def _find_immovable_masks(values: Mapping[str, Any], spec: CorrectionSpec) -> Iterator[Problem]:
    of, target, kept = f"{SECTION}.of", f"{SECTION}.target_kept", values["target_kept"]
    masks, movable = dict(spec.masks), _list_movable(spec, values["side"])
    names = _list_names(values["of"])

    def refuse(key: str, value: Any, reason: str, fix: str, *overrides: str) -> Problem:
        return Problem(key, value, reason, fix, parts=(), overrides=overrides)

    if not masks:
        fix = f"Set {target}=null; {SECTION}.target_ess moves the cap of a weight."
        yield refuse(target, kept, "the correction has no mask whose bounds could move.", fix)
        return
    if spec.skyrl_compat:
        reason = "correction.skyrl_compat=true applies masks one after another, so no mask has a share of its own."
        yield refuse(target, kept, reason, f"Set {target}=null, or correction.skyrl_compat=false.")
    first = (set_to(of, movable),) if len(movable) == 1 else ()
    if not names and len(movable) != 1:
        reason = f"{len(movable)} masks have bounds that could move: {', '.join(movable) or 'none'}."
        fix = f"Set {of}=[{movable[0]}] for example." if movable else f"Set {target}=null."
        yield refuse(of, None, reason, fix, *first)
    for name in names or movable:
        if name not in masks:
            yield refuse(
                of, name, "the correction has no mask of this name.", f"Choose one of {', '.join(masks)}.", *first
            )
        elif name not in movable:
            fix = f"Choose one of {', '.join(movable)}." if movable else f"Set {target}=null."
            yield refuse(of, name, _explain_immovable(masks[name], values["side"]), fix, *first)
        elif masks[name].ratio == "full" and spec.proximal in (*MU_ITSELF, "loglinear"):
            reason = (
                f"with correction.proximal={spec.proximal} backend noise cannot be distinguished from drift, but the "
                "bound must not fall below the noise."
            )
            fix = f"Set {target}=null, or correction.proximal=recompute."
            yield refuse(of, name, reason, fix)


def _find_immovable_cap(spec: CorrectionSpec, masks: list[str]) -> Iterator[tuple[str, str]]:
    """Find why the weight's cap cannot follow an ESS, and the fix; ``masks``: masks whose bounds also move.

    ``normalize`` is allowed, because it divides all weights by one number after the cap, which does not change the ESS.
    """
    weight, key = spec.weight, "correction.weight"
    if spec.weights:
        yield (
            "each of correction.weights has its own cap, but an ESS belongs to a single weight.",
            "set a single correction.weight",
        )
        return
    if weight is None:
        option = "stack a weight that truncates, such as correction=[tis_token,gsm]"
        yield f"{key}=null: there is no cap that could move.", option
        return
    if weight.by_staleness is not None:
        reason = f"{key}.by_staleness={format_value(list(weight.by_staleness))} gives each age its own cap."
        yield reason, f"{key}.by_staleness=null"
    if weight.by_position is not None:
        reason = f"{key}.by_position={weight.by_position:g} gives each position its own cap."
        yield reason, f"{key}.by_position=null"
    if weight.kind == "reject":
        yield f"{key}.kind=reject drops values beyond its bounds, and has no cap.", f"{key}.kind=truncate"
    elif weight.upper is None:
        yield f"{key}.upper=null: there is no cap that could move.", f"set {key}.upper"
    elif weight.upper <= 1:
        reason = "a cap moves by factors of its distance from 1, and must be above 1."
        yield f"{key}.upper={weight.upper:g}: {reason}", f"{key}.upper=2.0"
    if weight.kind != "reject" and weight.lower is not None and weight.lower >= 1:
        yield (
            f"{key}.lower={weight.lower:g}: the cap comes close to 1, and would cross this lower bound.",
            f"{key}.lower=0.5",
        )
    if spec.skyrl_compat and weight.level != "token":
        reason = f"correction.skyrl_compat=true applies masks before a weight of level {weight.level}."
        yield reason, "correction.skyrl_compat=false"
    if "weight" in masks:
        reason = (
            "the bounds of correction.masks.weight move too, and both metrics would be named "
            "offpolicy/calibrate/weight."
        )
        yield reason, "rename the mask"


def _explain_immovable(mask: MaskSpec, side: Side) -> str:
    if mask.budget is not None:
        return "budget computes a cutoff per batch, so there is no fixed bound to move."
    if mask.entry.of_age:
        return "an age is a whole number of versions, so it cannot be moved by a factor."
    if mask.by_staleness is not None:
        return "by_staleness gives each age its own bound, but distances are measured from a single bound."
    if mask.by_position is not None:
        return "by_position gives each position its own bound, but distances are measured from a single bound."
    zero = [name for name, distance in compute_distances(mask).items() if distance == 0]
    at = f" ({' and '.join(zero)} is at agreement, and moves by factors)" if zero else ""
    return f"the mask has no bound that could move with side={side}{at}."


def _list_movable(spec: CorrectionSpec, side: Side) -> list[str]:
    movable = [
        (name, mask)
        for name, mask in spec.masks
        if mask.budget is None and mask.by_position is None and f"masks.{name}" not in spec.age_parts
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
