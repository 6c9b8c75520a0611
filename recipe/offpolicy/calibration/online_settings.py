"""The keys of ``offpolicy.calibrate``: read once, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf

from ..correction import CorrectionSpec, MaskSpec
from ..forward_passes import correction_of
from . import online_cap_settings as cap_settings
from .online_bounds import WEIGHT
from .online_cap import CapSchedule
from .online_histogram import Side, moving_sides
from .online_schedule import Schedule, distances_of

SECTION = "offpolicy.calibrate"
DEFAULTS: Final[dict[str, Any]] = {
    "target_kept": None,
    "target_ess": None,
    "of": None,
    "side": "both",
    "every": 1,
    "window": 8,
    "warmup": 4,
    "rate": 0.2,
    "floor": 0.1,
    "ceiling": 10.0,
    "noise_kept": 0.99,
}
_COUNTS: Final = {"every": 1, "window": 1, "warmup": 0}

Finding = tuple[str, object, str, str]
"""Key, value, what is wrong, and the fix."""


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


def problems(config: DictConfig) -> Iterator[Finding]:
    """What is wrong with ``offpolicy.calibrate``, in a configuration whose correction is well formed."""
    section = OmegaConf.select(config, SECTION)
    if not isinstance(section, DictConfig):
        yield SECTION, section, "its keys have no values.", "Remove this override."
        return
    for key in map(str, section):
        if key not in DEFAULTS:
            yield f"{SECTION}.{key}", section[key], "unknown key.", f"Remove {SECTION}.{key}."
    values = _values(config)
    wrong = list(_malformed(values))
    yield from wrong
    if wrong or not _on(values):
        return
    spec = CorrectionSpec.from_mapping(correction_of(config))
    if values["target_kept"] is not None:
        yield from _misplaced(values, spec)
    if values["target_ess"] is not None:
        yield from cap_settings.misplaced(values["target_ess"], spec, _masks(values, spec))


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


def _malformed(values: dict[str, Any]) -> Iterator[Finding]:
    def key(name: str) -> str:
        return f"{SECTION}.{name}"

    target = values["target_kept"]
    if target is not None and not (_number(target) and 0.5 <= target < 1):
        yield key("target_kept"), target, "a share of what a mask looks at, from 0.5 to below 1.", "Set 0.98, or null."
    yield from cap_settings.malformed(values["target_ess"])
    if values["side"] not in get_args(Side):
        yield key("side"), values["side"], "no side of a band.", f"Set one of {', '.join(get_args(Side))}."
    names = values["of"]
    if not (names is None or isinstance(names, str | ListConfig | list)):
        yield key("of"), names, "not a list of masks.", f"Set {key('of')}=[gsm], or null for the one there is."
    for name, least in _COUNTS.items():
        if isinstance(values[name], bool) or not isinstance(values[name], int) or values[name] < least:
            yield key(name), values[name], f"a count of updates, a whole number of at least {least}.", "Set one."
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
            yield key(name), value, f"{what}.", f"Set {DEFAULTS[name]}."


def _misplaced(values: dict[str, Any], spec: CorrectionSpec) -> Iterator[Finding]:
    of, target = f"{SECTION}.of", f"{SECTION}.target_kept"
    masks, movable = dict(spec.masks), _movable(spec, values["side"])
    names = _named(values["of"])
    if not masks:
        yield (
            target,
            values["target_kept"],
            "the correction has no mask whose bounds could move.",
            f"Set {target}=null; {cap_settings.KEY} moves the cap of a weight.",
        )
        return
    if spec.skyrl_compat:
        reason = "correction.skyrl_compat=true lets one mask decide what another sees, so that no share is its own."
        yield target, values["target_kept"], reason, f"Set {target}=null, or correction.skyrl_compat=false."
    if not names and len(movable) != 1:
        reason = f"{len(movable)} masks have bounds that could move: {', '.join(movable) or 'none'}."
        fix = f"Set {of}=[{movable[0]}] for example." if movable else f"Set {target}=null."
        yield of, None, reason, fix
    for name in names or movable:
        if name not in masks:
            yield of, name, "no mask of the correction.", f"Choose of {', '.join(masks)}."
        elif name not in movable:
            yield of, name, _unmovable(masks[name], values["side"]), f"Choose of {', '.join(movable) or 'other masks'}."
        elif masks[name].ratio == "full" and spec.proximal in ("bypass", "loglinear"):
            reason = (
                f"with correction.proximal={spec.proximal} nothing tells backend noise from drift, and the bound must "
                f"not get below it."
            )
            yield of, name, reason, f"Set correction.proximal=recompute, or {target}=null."


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
