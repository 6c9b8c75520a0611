"""Bounds that follow the data of a run: the trainer's side, which decides them for every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from ..correction import CorrectionSpec, Statistic
from ..correction.statistics import Reduction, merge_all
from ..voice import logger
from .online_bounds import Bounds, bounds_of, with_bounds
from .online_histogram import DISTANCE, KEPT, NOISE
from .online_schedule import Evidence, next_bounds, obstacles
from .online_settings import Settings, settings_of

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
        self._configured = dict(spec.masks)
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
        """Mask -> the bounds that the next update is to use."""
        return bounds_of(self.spec, self.settings.masks)

    def observe(self, merged: Mapping[str, Statistic]) -> None:
        """Take in what one update showed, over all micro-batches and ranks, and decide the bounds of the next."""
        self._shown = self._metrics(merged)
        self._updates += 1
        self._window = [*self._window, dict(merged)][-self.settings.window :]
        past = self._updates - self.settings.warmup
        if past >= 0 and past % self.settings.every == 0:
            self._move()

    def metrics(self) -> dict[str, float]:
        """``<mask>/lower`` and so on of the last update, below ``offpolicy/calibrate/``."""
        return {f"calibrate/{name}": value for name, value in self._shown.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, in plain values."""
        window = [{name: list(map(float, s.parts)) for name, s in seen.items()} for seen in self._window]
        return {"bounds": self.bounds, "window": [_sparse(seen) for seen in window], "updates": self._updates}

    def restore(self, state: Mapping[str, Any], *, same_keys: bool) -> None:
        """Take up where ``state`` was written, by a run of the same correction.

        Args:
            same_keys: it had the keys of this one; else what it measured was measured otherwise, and is forgotten.
        """
        bounds: Mapping[str, Bounds] = {n: b for n, b in state["bounds"].items() if n in self.settings.masks}
        self.spec = with_bounds(self.spec, bounds)
        window = state["window"] if same_keys else []
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
        masks, schedule = dict(self.spec.masks), self.settings.schedule
        moved = {}
        for name in self.settings.masks:
            if f"{name}/{DISTANCE}" not in seen:
                continue
            evidence = _evidence(name, seen)
            moved[name] = next_bounds(schedule, self._configured[name], masks[name], evidence)
            self._say(name, obstacles(schedule, self._configured[name], masks[name], evidence))
        before, self.spec = self.bounds, with_bounds(self.spec, moved)
        for name, bounds in self.bounds.items():
            if bounds == before[name]:
                continue
            kept = seen[f"{name}/{KEPT}"]
            units = UNITS["token" if masks[name].picks_tokens else masks[name].level]
            logger.info(
                "correction.masks.%s: %s -> %s from the next update on. Its bounds kept %.4f of %.0f %s that it looks "
                "at, in %d update(s); offpolicy.calibrate.target_kept=%g.",
                name,
                _spelt(before[name]),
                _spelt(bounds),
                kept.value(),
                float(kept.parts[1]),
                units,
                len(self._window),
                schedule.target_kept,
            )

    def _say(self, name: str, found: Mapping[str, str]) -> None:
        """Warn of what has come into the way of a mask's bounds, once while it lasts."""
        for kind in sorted(set(found) - self._hindered.get(name, set())):
            logger.warning("correction.masks.%s: %s", name, found[kind])
        self._hindered[name] = set(found)

    def _metrics(self, merged: Mapping[str, Statistic]) -> dict[str, float]:
        shown: dict[str, float] = {}
        for name, mask in self.spec.masks:
            if name not in self.settings.masks:
                continue
            for side in ("lower", "upper", "delta"):
                if (bound := getattr(mask, side)) is not None:
                    shown[f"{name}/{side}"] = bound
            kept = merged.get(f"{name}/{KEPT}")
            shown[f"{name}/kept"] = float("nan") if kept is None else kept.value()
            shown[f"{name}/target"] = self.settings.schedule.target_kept
        return shown


def _evidence(name: str, seen: Mapping[str, Statistic]) -> Evidence:
    noise = seen.get(f"{name}/{NOISE}")
    return Evidence(_counts(seen[f"{name}/{DISTANCE}"]), None if noise is None else _counts(noise))


def _counts(statistic: Statistic) -> Sequence[float]:
    return [float(count) for count in statistic.parts]


def _spelt(bounds: Bounds) -> str:
    return ", ".join(f"{key}={'null' if value is None else format(value, '.6g')}" for key, value in bounds.items())


def _sparse(seen: Mapping[str, list[float]]) -> dict[str, Any]:
    """Histograms by the bins that hold something; shares as they are."""
    return {
        name: parts
        if name.endswith(f"/{KEPT}")
        else {"bins": len(parts), "counts": {str(place): n for place, n in enumerate(parts) if n}}
        for name, parts in seen.items()
    }


def _dense(seen: Mapping[str, Any]) -> dict[str, Statistic]:
    dense = {}
    for name, parts in seen.items():
        if name.endswith(f"/{KEPT}"):
            dense[name] = Statistic(Reduction.MEAN, tuple(parts))
            continue
        counts = [0.0] * parts["bins"]
        for place, count in parts["counts"].items():
            counts[int(place)] = float(count)
        dense[name] = Statistic(Reduction.SUM, tuple(counts))
    return dense
