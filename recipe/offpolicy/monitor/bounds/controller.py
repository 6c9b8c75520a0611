"""Bounds that follow the data of a run: the trainer's side, which decides them for every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from ...correction import CorrectionSpec, Reduction, Statistic
from ...correction.moving_bounds import WEIGHT, Bounds, format_part_path, read_bounds, replace_bounds
from ...correction.statistics import merge_all
from .cap_histogram import ESS, CapSums
from .cap_schedule import CapSchedule, cap_obstacles, next_cap
from .histogram import DISTANCE, KEPT, NOISE, reduction_of
from .mask_schedule import Evidence, Schedule, next_bounds, obstacles
from .settings import Settings, settings_of

logger = logging.getLogger("verl.offpolicy")

UNITS = {"token": "tokens", "sequence": "rows", "turn": "turns", "version": "rows by version"}


class Calibration:
    """The bounds in force, and what the latest updates showed.

    Args:
        settings: what moves, and how.
        spec: the correction as it is configured.

    Attributes:
        spec: the correction under the bounds of the next update.
    """

    def __init__(self, settings: Settings, spec: CorrectionSpec) -> None:
        self.settings = settings
        self.spec = spec
        self._configured = spec
        self._window: list[dict[str, Statistic]] = []
        self._updates = 0
        self._hindered: dict[str, set[str]] = {}
        self._shown = self._metrics({})

    @classmethod
    def of(cls, config: DictConfig, spec: CorrectionSpec) -> Calibration | None:
        """That of a composed configuration; None where nothing is calibrated."""
        settings = settings_of(config, spec)
        return None if settings is None else cls(settings, spec)

    @property
    def bounds(self) -> dict[str, dict[str, float | None]]:
        """Part -> the bounds that the next update is to use."""
        return read_bounds(self.spec, self.settings.moving)

    def observe(self, merged: Mapping[str, Statistic]) -> None:
        """Take in what one update showed, over all micro-batches and ranks, and decide the bounds of the next."""
        self._shown = self._metrics(merged)
        self._updates += 1
        self._window = [*self._window, dict(merged)][-self.settings.window :]
        past = self._updates - self.settings.warmup
        if past >= 0 and past % self.settings.every == 0:
            self._move()

    def metrics(self) -> dict[str, float]:
        """``<mask>/lower``, ``weight/upper`` and so on of the last update, below ``offpolicy/calibrate/``."""
        return {f"calibrate/{name}": value for name, value in self._shown.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, in plain values."""
        window = [{name: list(map(float, s.parts)) for name, s in seen.items()} for seen in self._window]
        return {"bounds": self.bounds, "window": [_sparse(seen) for seen in window], "updates": self._updates}

    def restore(self, state: Mapping[str, Any], *, same_keys: bool) -> None:
        """Take up where ``state`` was written.

        A part that has come to be bounded by other keys starts as it is configured.

        Args:
            same_keys: it had the keys of this one; else what it measured was measured otherwise, and is forgotten.
        """
        here = self.bounds
        bounds: Mapping[str, Bounds] = {name: b for name, b in state["bounds"].items() if name in here}
        other = {name for name, left in bounds.items() if _open(left) != _open(here[name])}
        for name in sorted(other):
            logger.warning(
                "correction.%s: the checkpoint has it at %s, other keys than its own: it starts at %s, as configured.",
                format_part_path(name),
                _spelt(bounds[name]),
                _spelt(here[name]),
            )
        self.spec = replace_bounds(self.spec, {name: left for name, left in bounds.items() if name not in other})
        window = state["window"] if same_keys and not other else []
        self._window = [_dense(seen) for seen in window][-self.settings.window :]
        self._updates = int(state["updates"])
        self._shown = self._metrics({})

    def pause(self, merged: Mapping[str, Statistic]) -> None:
        """Leave the bounds as they are and forget the window, where another correction comes in between.

        Args:
            merged: of the update before that; empty of one under the other correction.
        """
        self._window, self._shown = [], self._metrics(merged)

    def _move(self) -> None:
        seen = merge_all(self._window)
        moved: dict[str, Bounds] = {}
        if self.settings.schedule is not None:
            moved |= self._moved_masks(self.settings.schedule, seen)
        if self.settings.cap is not None:
            moved |= self._moved_cap(self.settings.cap, seen)
        before, self.spec = self.bounds, replace_bounds(self.spec, moved)
        for name, bounds in self.bounds.items():
            if bounds != before[name]:
                change = f"{_spelt(before[name])} -> {_spelt(bounds)}"
                logger.info(
                    "correction.%s: %s from the next update on. %s",
                    format_part_path(name),
                    change,
                    self._why(name, seen),
                )

    def _moved_masks(self, schedule: Schedule, seen: Mapping[str, Statistic]) -> dict[str, Bounds]:
        configured, masks = dict(self._configured.masks), dict(self.spec.masks)
        moved: dict[str, Bounds] = {}
        for name in self.settings.masks:
            if f"{name}/{DISTANCE}" not in seen:
                continue
            evidence = _evidence(name, seen)
            moved[name] = next_bounds(schedule, configured[name], masks[name], evidence)
            self._say(name, obstacles(schedule, configured[name], masks[name], evidence))
        return moved

    def _moved_cap(self, schedule: CapSchedule, seen: Mapping[str, Statistic]) -> dict[str, Bounds]:
        sums, configured, current = CapSums.of(seen), self._configured.weight, self.spec.weight
        if sums is None or configured is None or current is None:
            return {}
        self._say(WEIGHT, cap_obstacles(schedule, configured, sums))
        return {WEIGHT: next_cap(schedule, configured, current, sums)}

    def _why(self, name: str, seen: Mapping[str, Statistic]) -> str:
        """What the updates looked at showed of a part whose bounds change."""
        updates = f"{len(self._window)} update(s)"
        if name == WEIGHT:
            assert self.settings.cap is not None
            return (
                f"Its caps left an ESS of {seen[ESS].value():.4f} of {float(seen[ESS].parts[-1]):.0f} tokens in "
                f"{updates}; offpolicy.calibrate.target_ess={self.settings.cap.target_ess:g}."
            )
        assert self.settings.schedule is not None
        kept, mask = seen[f"{name}/{KEPT}"], dict(self.spec.masks)[name]
        units = UNITS["token" if mask.picks_tokens else mask.level]
        return (
            f"Its bounds kept {kept.value():.4f} of {float(kept.parts[1]):.0f} {units} that it looks at, in {updates}; "
            f"offpolicy.calibrate.target_kept={self.settings.schedule.target_kept:g}."
        )

    def _say(self, name: str, found: Mapping[str, str]) -> None:
        """Warn of what has come into the way of a part's bounds, once while it lasts."""
        for kind in sorted(set(found) - self._hindered.get(name, set())):
            logger.warning("correction.%s: %s", format_part_path(name), found[kind])
        self._hindered[name] = set(found)

    def _metrics(self, merged: Mapping[str, Statistic]) -> dict[str, float]:
        shown: dict[str, float] = {}
        schedule, cap, weight = self.settings.schedule, self.settings.cap, self.spec.weight
        for name, mask in self.spec.masks:
            if schedule is None or name not in self.settings.masks:
                continue
            for side in ("lower", "upper", "delta"):
                if (bound := getattr(mask, side)) is not None:
                    shown[f"{name}/{side}"] = bound
            shown[f"{name}/kept"] = _value(merged, f"{name}/{KEPT}")
            shown[f"{name}/target"] = schedule.target_kept
        if cap is not None and weight is not None and weight.upper is not None:
            of_cap = {"upper": weight.upper, "ess": _value(merged, ESS), "target": cap.target_ess}
            shown |= {f"weight/{name}": value for name, value in of_cap.items()}
        return shown


def _value(merged: Mapping[str, Statistic], name: str) -> float:
    statistic = merged.get(name)
    return float("nan") if statistic is None else statistic.value()


def _evidence(name: str, seen: Mapping[str, Statistic]) -> Evidence:
    noise = seen.get(f"{name}/{NOISE}")
    return Evidence(_counts(seen[f"{name}/{DISTANCE}"]), None if noise is None else _counts(noise))


def _counts(statistic: Statistic) -> Sequence[float]:
    return [float(count) for count in statistic.parts]


def _open(bounds: Bounds) -> dict[str, bool]:
    """Which of the keys that bound a part are null."""
    return {key: value is None for key, value in bounds.items()}


def _spelt(bounds: Bounds) -> str:
    return ", ".join(f"{key}={'null' if value is None else format(value, '.6g')}" for key, value in bounds.items())


def _sparse(seen: Mapping[str, list[float]]) -> dict[str, Any]:
    """Histograms by the bins that hold something; shares as they are."""
    return {
        name: {"bins": len(parts), "counts": {str(place): n for place, n in enumerate(parts) if n}}
        if reduction_of(name) is Reduction.SUM
        else parts
        for name, parts in seen.items()
    }


def _dense(seen: Mapping[str, Any]) -> dict[str, Statistic]:
    dense = {}
    for name, parts in seen.items():
        if reduction_of(name) is not Reduction.SUM:
            dense[name] = Statistic(reduction_of(name), tuple(parts))
            continue
        counts = [0.0] * parts["bins"]
        for place, count in parts["counts"].items():
            counts[int(place)] = float(count)
        dense[name] = Statistic(Reduction.SUM, tuple(counts))
    return dense
