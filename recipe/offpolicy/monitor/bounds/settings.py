"""The keys of ``offpolicy.calibrate``: read once, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf

from ...batch.shipped import shipped
from ...correction import CorrectionSpec, MaskSpec, Problem
from ...correction.moving_bounds import WEIGHT, Side
from ...correction.problem import format_value, remove, set_to
from . import cap_settings
from .cap_schedule import CapSchedule
from .histogram import moving_sides
from .mask_schedule import Schedule, distances_of

SECTION = "offpolicy.calibrate"
DEFAULTS: Final = shipped("calibrate")
_COUNTS: Final = {"every": 1, "window": 1, "warmup": 0}

_OF_MASKS: Final = ("of", "side", "noise_kept")
_PACE: Final = ("every", "window", "warmup", "rate", "floor", "ceiling")


@dataclass(frozen=True)
class Settings:
    """What is calibrated, and how.

    Attributes:
        schedule: of masks; None where none moves.
        masks: names of the masks whose bounds move; empty for none.
        cap: of the weight; None where it does not move.
        every: updates between two changes.
        window: the latest updates that a change looks at.
        warmup: updates before the first change.
    """

    schedule: Schedule | None
    masks: tuple[str, ...]
    cap: CapSchedule | None
    every: int
    window: int
    warmup: int

    @property
    def moving(self) -> dict[str, Side]:
        """Parts whose bounds come with each update, and the sides that move."""
        masks = {} if self.schedule is None else dict.fromkeys(self.masks, self.schedule.side)
        return masks if self.cap is None else {**masks, WEIGHT: "upper"}


def settings_of(config: DictConfig, spec: CorrectionSpec) -> Settings | None:
    """The settings of a configuration without ``problems``; None where nothing is calibrated."""
    values = _values(config)
    if not _on(values):
        return None
    pace = {name: float(values[name]) for name in ("rate", "floor", "ceiling")}
    schedule, cap = None, None
    if values["target_kept"] is not None:
        noise_kept = float(values["noise_kept"])
        schedule = Schedule(float(values["target_kept"]), side=values["side"], noise_kept=noise_kept, **pace)
    if values["target_ess"] is not None:
        cap = CapSchedule(float(values["target_ess"]), **pace)
    return Settings(schedule, _masks(values, spec), cap, **{name: int(values[name]) for name in _COUNTS})


def plain(config: DictConfig) -> dict[str, Any]:
    """The keys as a checkpoint notes them; where nothing is calibrated, the one that says so."""
    values = _values(config)
    if not _on(values):
        return {"target_kept": None}
    noted = values | {"of": _named(values["of"]) or None}
    # A target that is not set is not noted, so that checkpoints from before there was one go on.
    return noted if values["target_ess"] is not None else {key: noted[key] for key in noted if key != "target_ess"}


def problems(config: DictConfig, spec: CorrectionSpec) -> Iterator[Problem]:
    """Find what is wrong with ``offpolicy.calibrate`` beside the correction ``spec``."""
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig):
        yield Problem(SECTION, section, "its keys have no values.", "Remove this override.", parts=())
        return
    for name in map(str, section):
        if name not in DEFAULTS:
            key, given = f"{SECTION}.{name}", section[name]
            yield Problem(key, given, "unknown key.", parts=(), overrides=remove(key, given))
    values = _values(config)
    if wrong := list(_malformed(values)):
        yield from wrong
        return
    yield from _unread(values)
    if not _on(values):
        return
    if values["target_kept"] is not None:
        yield from _misplaced(values, spec)
    if values["target_ess"] is not None:
        yield from cap_settings.misplaced(values["target_ess"], spec, _masks(values, spec))


def _problem(name: str, value: Any, reason: str, fix: str = "", **mend: Any) -> Problem:
    """A problem of one key; ``mend`` holds the keys of the section that mend it, by default what is shipped."""
    mend = mend or {name: DEFAULTS[name]}
    overrides = tuple(set_to(f"{SECTION}.{key}", wanted) for key, wanted in mend.items())
    return Problem(f"{SECTION}.{name}", value, reason, fix, parts=(), overrides=overrides)


def _unread(values: dict[str, Any]) -> Iterator[Problem]:
    """Keys that are set and that nothing reads, because no target, or none of masks, is set."""
    if values["target_kept"] is not None:
        return
    needed = "target_kept" if _on(values) else "target_kept or target_ess"
    for name in _OF_MASKS if _on(values) else (*_OF_MASKS, *_PACE):
        if values[name] != DEFAULTS[name]:
            reason = f"nothing reads it without {SECTION}.{needed}."
            fix = f"Set {SECTION}.target_kept=0.98 for example, or {SECTION}.{name}={format_value(DEFAULTS[name])}."
            yield _problem(name, values[name], reason, fix)


def _values(config: DictConfig) -> dict[str, Any]:
    section: Any = OmegaConf.select(config, SECTION)
    return DEFAULTS | (dict(section) if isinstance(section, DictConfig) else {})


def _on(values: dict[str, Any]) -> bool:
    return values["target_kept"] is not None or values["target_ess"] is not None


def _masks(values: dict[str, Any], spec: CorrectionSpec) -> tuple[str, ...]:
    """Names of the masks whose bounds move."""
    if values["target_kept"] is None:
        return ()
    return tuple(sorted(_named(values["of"]))) or tuple(_movable(spec, values["side"]))


def _malformed(values: dict[str, Any]) -> Iterator[Problem]:
    target = values["target_kept"]
    if target is not None and not (_number(target) and 0.5 <= target < 1):
        reason = "a share of what a mask looks at, from 0.5 to below 1."
        yield _problem("target_kept", target, reason, "Set 0.98, or null.", target_kept=0.98)
    yield from cap_settings.malformed(values["target_ess"])
    if values["side"] not in get_args(Side):
        yield _problem("side", values["side"], "no side of a band.", f"Set one of {', '.join(get_args(Side))}.")
    names = values["of"]
    if not (names is None or isinstance(names, str | ListConfig | list)):
        fix = f"Set {SECTION}.of=[gsm] for example, or null for the one there is."
        yield _problem("of", names, "not a list of masks.", fix)
    for name, least in _COUNTS.items():
        if isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < least:
            yield _problem(name, values[name], f"a count of updates, a whole number of at least {least}.")
    ranges = {
        "rate": (0.0, 1.0, "a factor less one, above 0 and at most 1"),
        "floor": (0.0, 1.0, "a multiple of the configured bound's distance from agreement, above 0 and at most 1"),
        "ceiling": (1.0, math.inf, "a multiple of the configured bound's distance from agreement, 1 or more"),
        "noise_kept": (0.5, 1.0, "a share of rows, from 0.5 to below 1"),
    }
    for name, (low, high, what) in ranges.items():
        value = values[name]
        inside = (
            _number(value)
            and {
                "rate": low < value <= high,
                "floor": low < value <= high,
                "ceiling": low <= value < high,
                "noise_kept": low <= value < high,
            }[name]
        )
        if not inside:
            yield _problem(name, value, f"{what}.")


def _misplaced(values: dict[str, Any], spec: CorrectionSpec) -> Iterator[Problem]:
    of, target = f"{SECTION}.of", f"{SECTION}.target_kept"
    masks, movable = dict(spec.masks), _movable(spec, values["side"])
    names = _named(values["of"])
    if not masks:
        reason = "the correction has no mask whose bounds could move."
        fix = f"Set {target}=null; {cap_settings.KEY} moves the cap of a weight."
        yield _problem("target_kept", values["target_kept"], reason, fix)
        return
    if spec.skyrl_compat:
        reason = "correction.skyrl_compat=true lets one mask decide what another sees, so that no share is its own."
        fix = f"Set {target}=null, or correction.skyrl_compat=false."
        yield _problem("target_kept", values["target_kept"], reason, fix)
    if not names and len(movable) != 1:
        reason = f"{len(movable)} masks have bounds that could move: {', '.join(movable) or 'none'}."
        fix = f"Set {of}=[{movable[0]}] for example." if movable else f"Set {target}=null."
        mend: dict[str, Any] = {"of": movable[:1]} if movable else {"target_kept": None}
        yield _problem("of", None, reason, fix, **mend)
    for name in names or movable:
        first: dict[str, Any] = {"of": movable[:1]} if movable else {"target_kept": None, "of": None}
        if name not in masks:
            yield _problem("of", name, "no mask of the correction.", f"Choose of {', '.join(masks)}.", **first)
        elif name not in movable:
            fix = f"Choose of {', '.join(movable)}." if movable else f"Set {target}=null."
            yield _problem("of", name, _unmovable(masks[name], values["side"]), fix, **first)
        elif masks[name].ratio == "full" and spec.proximal in ("bypass", "loglinear"):
            reason = (
                f"with correction.proximal={spec.proximal} nothing tells backend noise from drift, and the bound must "
                f"not get below it."
            )
            fix = f"Set {target}=null, or correction.proximal=recompute."
            yield _problem("of", name, reason, fix, target_kept=None, of=None)


def _movable(spec: CorrectionSpec, side: Side) -> list[str]:
    return [name for name, mask in spec.masks if mask.budget is None and moving_sides(mask, side)]


def _unmovable(mask: MaskSpec, side: Side) -> str:
    if mask.budget is not None:
        return "budget is cut by batch, and no bound stands still between two batches."
    zero = [name for name, distance in distances_of(mask).items() if distance == 0]
    at = f" ({' and '.join(zero)} is at agreement, and moves by factors)" if zero else ""
    return f"it has no bound that could move with side={side}{at}."


def _named(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(name) for name in value]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
