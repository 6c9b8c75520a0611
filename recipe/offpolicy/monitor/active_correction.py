"""Choose the correction and the bounds of the next update, based on alarms and calibration.

The active correction is the configured one or an alarm's fallback, with the configured bounds or with bounds that a
schedule has moved. One trainer process decides for all ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig

from ..correction import CorrectionSpec, MaskSpec, Reduction, Statistic, WeightSpec
from ..correction.spec import WEIGHT, Bounds, Side, format_bounds, format_part_path, read_bounds, replace_bounds
from ..correction.statistics import merge_all
from ..fault_tolerance.checkpoints import find_changes
from . import alarm_settings, bound_settings
from .alarms import CONFIGURED, Alarms
from .moving_bounds import (
    DISTANCE,
    ESS,
    KEPT,
    NOISE,
    Evidence,
    compute_distances,
    count_bins,
    find_moving_sides,
    get_reduction,
    read_histogram,
)

logger = logging.getLogger("verl.offpolicy")

_UNITS = {
    "token": "tokens",
    "prefix": "tokens",
    "sequence": "sequences",
    "turn": "turns",
    "version": "sequences by version",
}


class Calibration:
    """Keeps the current bounds and the statistics of the most recent updates; does nothing if no bounds move.

    Args:
        config: composed configuration of the run.
        spec: the configured correction.

    Attributes:
        settings: which bounds move, and how.
        spec: the correction with the bounds of the next update.
    """

    def __init__(self, config: DictConfig, spec: CorrectionSpec) -> None:
        self.settings = bound_settings.read_settings(config, spec)
        self.spec = self._configured = spec
        self._window: list[dict[str, Statistic]] = []
        self._updates = 0
        self._hindered: dict[str, set[str]] = {}
        self._shown = self._compute_metrics({})

    @property
    def bounds(self) -> dict[str, dict[str, float | None]]:
        """Part -> the bounds of the next update."""
        return read_bounds(self.spec, self.settings.moving)

    def observe(self, merged: Mapping[str, Statistic]) -> None:
        """Add an update's statistics, merged over micro-batches and ranks, and decide the bounds of the next update."""
        self._shown = self._compute_metrics(merged)
        self._updates += 1
        self._window = [*self._window, dict(merged)][-self.settings.window :]
        past = self._updates - self.settings.warmup
        if past >= 0 and past % self.settings.every == 0:
            self._move()

    def metrics(self) -> dict[str, float]:
        """Return ``<mask>/lower``, ``weight/upper`` and so on of the last update, under ``offpolicy/calibrate/``."""
        return {f"calibrate/{name}": value for name, value in self._shown.items()}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {"bounds": self.bounds, "window": [_to_plain(seen) for seen in self._window], "updates": self._updates}

    def restore(self, state: Mapping[str, Any], *, same_keys: bool) -> None:
        """Restore a checkpoint's ``state``.

        If the saved bounds of a part do not have the same keys as its configured bounds, the configured ones are used.

        Args:
            same_keys: whether the checkpoint had the same ``offpolicy.calibrate`` keys; if False, its window is
                discarded because it was measured differently.
        """
        here = self.bounds
        if same_keys and here.keys() != state["bounds"].keys():
            raise ValueError(
                f"calibration.bounds have the parts {sorted(state['bounds'])}, but {sorted(here)} were expected"
            )
        bounds: Mapping[str, Bounds] = {name: b for name, b in state["bounds"].items() if name in here}
        other = {name for name, left in bounds.items() if _list_set(left) != _list_set(here[name])}
        if same_keys and other:
            raise ValueError(
                f"calibration.bounds of {sorted(other)} do not have the same open sides as the correction's bounds"
            )
        for name in sorted(other):
            logger.warning(
                "correction.%s: the bounds in the checkpoint, %s, have other keys, so the bounds start at the "
                "configured %s.",
                *(format_part_path(name), format_bounds(bounds[name]), format_bounds(here[name])),
            )
        self.spec = replace_bounds(self.spec, {name: left for name, left in bounds.items() if name not in other})
        if same_keys:
            self._check_range()
        window = state["window"] if same_keys and not other else []
        self._window = [_from_plain(seen) for seen in window][-self.settings.window :]
        self._updates = int(state["updates"])
        self._shown = self._compute_metrics({})

    def _check_range(self) -> None:
        """Check that each bound is in the range of its schedule.

        Raises:
            ValueError: a bound is out of range.
        """
        configured, now = _list_parts(self._configured), _list_parts(self.spec)
        for name, schedule in self.settings.schedules.items():
            start, found = compute_distances(configured[name]), compute_distances(now[name])
            for side, distance in found.items():
                if side in find_moving_sides(configured[name], schedule.side):
                    least, most = schedule.floor * start[side], schedule.ceiling * start[side]
                    fits = least * (1 - 1e-6) <= distance <= max(most, start[side]) * (1 + 1e-6)
                else:
                    fits = distance == start[side]
                if not fits:
                    bounds = format_bounds(self.bounds[name])
                    raise ValueError(f"calibration.bounds.{name}={bounds} is out of range")

    def pause(self, merged: Mapping[str, Statistic]) -> None:
        """Keep the bounds but discard the window, because another correction becomes active.

        Args:
            merged: statistics of the last update before the change; empty if that update already used another
                correction.
        """
        self._window, self._shown = [], self._compute_metrics(merged)

    def _move(self) -> None:
        seen = merge_all(self._window)
        configured, current = _list_parts(self._configured), _list_parts(self.spec)
        moved: dict[str, Bounds] = {}
        for name, schedule in self.settings.schedules.items():
            histogram = read_histogram(seen, name if name == WEIGHT else f"{name}/{DISTANCE}")
            if histogram is None:
                continue
            noise = read_histogram(seen, f"{name}/{NOISE}")
            evidence = Evidence(schedule, configured[name], current[name], histogram, noise)
            moved[name] = evidence.compute_next_bounds()
            self._warn(name, evidence.find_obstacles())
        before, self.spec = self.bounds, replace_bounds(self.spec, moved)
        for name, bounds in self.bounds.items():
            if bounds != before[name]:
                change = f"{format_bounds(before[name])} -> {format_bounds(bounds)}"
                explanation = self._explain(name, seen[_name_outcome(name)])
                logger.info(
                    "correction.%s: %s from the next update on. %s", format_part_path(name), change, explanation
                )

    def _explain(self, name: str, outcome: Statistic) -> str:
        """Explain a change of bounds by reporting the effect that the previous bounds had over the window."""
        updates, target = f"{len(self._window)} update(s)", f"{self.settings.schedules[name].target:g}"
        value, count = outcome.value(), float(outcome.parts[-1])
        if name == WEIGHT:
            left = f"With the previous caps, the ESS was {value:.4f} of {count:.0f} tokens"
            return f"{left} in {updates}; offpolicy.calibrate.target_ess={target}."
        mask = dict(self.spec.masks)[name]
        units = _UNITS["token" if mask.picks_tokens else mask.level]
        kept = f"The previous bounds kept {value:.4f} of the {count:.0f} {units} to which the mask applies"
        return f"{kept}, in {updates}; offpolicy.calibrate.target_kept={target}."

    def _warn(self, name: str, found: Mapping[str, str]) -> None:
        """Warn if a part's bounds cannot be updated; do not repeat the warning while the cause persists."""
        for kind in sorted(set(found) - self._hindered.get(name, set())):
            logger.warning("correction.%s: %s", format_part_path(name), found[kind])
        self._hindered[name] = set(found)

    def _compute_metrics(self, merged: Mapping[str, Statistic]) -> dict[str, float]:
        shown: dict[str, float] = {}
        for name, part in _list_parts(self.spec).items():
            if (schedule := self.settings.schedules.get(name)) is None:
                continue
            # A weight of kind ``clip`` also has a lower bound, which never moves.
            keys = ("upper",) if name == WEIGHT else ("lower", "upper", "delta")
            bounds = {key: getattr(part, key) for key in keys}
            outcome = _name_outcome(name)
            value = merged[outcome].value() if outcome in merged else math.nan
            values = bounds | {outcome.rpartition("/")[2]: value, "target": schedule.target}
            shown_as = "weight" if name == WEIGHT else name
            shown |= {f"{shown_as}/{key}": value for key, value in values.items() if value is not None}
        return shown


_PARTS = {Reduction.MEAN: 2, Reduction.ESS: 3}
_MOST = 1e15
"""Largest possible count or sum over the tokens of an update."""


def _list_parts(spec: CorrectionSpec) -> dict[str, MaskSpec | WeightSpec]:
    """List the masks by name, and the weight as ``WEIGHT``."""
    return {**dict(spec.masks), **({} if spec.weight is None else {WEIGHT: spec.weight})}


def _name_outcome(name: str) -> str:
    """Return the name of the statistic that a part's target refers to."""
    return ESS if name == WEIGHT else f"{name}/{KEPT}"


def _list_set(bounds: Bounds) -> dict[str, bool]:
    """Return, for each key, whether the bound is set."""
    return {key: value is not None for key, value in bounds.items()}


def _to_plain(seen: Mapping[str, Statistic]) -> dict[str, Any]:
    """Convert histograms to their non-empty bins, and other statistics to their parts."""
    plain: dict[str, Any] = {}
    for name, statistic in seen.items():
        parts = [float(part) for part in statistic.parts]
        counts = {str(place): count for place, count in enumerate(parts) if count}
        plain[name] = {"bins": len(parts), "counts": counts} if get_reduction(name) is Reduction.SUM else parts
    return plain


def _from_plain(seen: Mapping[str, Any]) -> dict[str, Statistic]:
    """Convert the result of ``_to_plain`` back to statistics.

    Raises:
        KeyError, TypeError, ValueError: the values are not a result of ``_to_plain``.
    """
    found = {}
    for name, parts in seen.items():
        reduction = get_reduction(name)
        if reduction is Reduction.SUM:
            bins, counts = parts["bins"], {int(place): count for place, count in parts["counts"].items()}
            if bins != count_bins(name) or not all(0 <= place < bins for place in counts):
                raise ValueError(f"calibration.window.{name} has {bins} bins instead of {count_bins(name)}")
            parts = [float(counts.get(place, 0.0)) for place in range(bins)]
        # Statistics that are summed as differences from 1, such as those of an ESS, may be negative.
        least = -_MOST if reduction is Reduction.ESS else 0.0
        if _PARTS.get(reduction, len(parts)) != len(parts) or not all(least <= part <= _MOST for part in parts):
            raise ValueError(f"calibration.window.{name} does not contain the sums and counts of an update")
        found[name] = Statistic(reduction, tuple(parts))
    return found


class ActiveCorrection:
    """The active correction and its bounds.

    Args:
        spec: the configured correction.
        config: the composed configuration of the run, prepared by ``main_offpolicy``.
    """

    def __init__(self, spec: CorrectionSpec, config: DictConfig) -> None:
        self._alarms = Alarms(config)
        self._calibration = Calibration(config, spec)
        self._noted = bound_settings.read_noted_keys(config)

    @property
    def spec(self) -> CorrectionSpec:
        """The correction to use in the next update, with its bounds."""
        return self._alarms.fallback or self._calibration.spec

    @property
    def moving(self) -> dict[str, Side]:
        """The sides that move, for each part whose bounds are sent with each update; empty during a fallback."""
        return {} if self._alarms.fallback is not None else self._calibration.settings.moving

    @property
    def bounds(self) -> dict[str, dict[str, float | None]]:
        """Part -> its bounds at the next update, for the parts in ``moving``."""
        return self._calibration.bounds if self.moving else {}

    def after_update(
        self,
        values: Mapping[str, float],
        histograms: Mapping[str, Statistic],
        extensions: Mapping[str, float] = MappingProxyType({}),
    ) -> bool:
        """Evaluate one update's statistics, and decide the correction and the bounds of the next update.

        Args:
            values: statistics under ``offpolicy/``.
            histograms: histograms of the parts in ``moving``, see ``moving_bounds.defer_histograms``.
            extensions: metrics of extensions, by full name.

        Returns:
            Whether the active correction has changed. The new correction must then be sent to the workers and proved.

        Raises:
            AlarmError: an alarm ends the run.
        """
        moving = bool(self.moving)
        switched = self._alarms.judge(self.spec, values, extensions)
        if moving and not switched:
            self._calibration.observe(histograms)
        else:
            self._calibration.pause(histograms)
        return switched

    def metrics(self) -> dict[str, float]:
        """Return the metrics of alarms and bounds, under ``offpolicy/``; their keys are the same at every update."""
        return self._alarms.metrics() | self._calibration.metrics()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        fallback = self._alarms.fallback
        return {
            "alarms": self._alarms.state(),
            "fallback": fallback and fallback.to_mapping(),
            "calibrate": self._noted,
            "calibration": self._calibration.state() if self._calibration.settings.moving else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the parts of ``state`` for which this run has the same settings; see ``find_differences``."""
        alarms = state["alarms"]
        name, there = alarms["in_force"], self._alarms.get_fallback(alarms["in_force"])
        goes_on = there is not None and there.to_mapping() == state["fallback"]
        self._alarms.restore(alarms, in_force=name if goes_on else CONFIGURED)
        if self._calibration.settings.moving:
            same_keys = state["calibrate"] == self._noted
            if state["calibration"] is None and same_keys:
                raise ValueError("calibration=null, but calibrate has a target")
            if state["calibration"] is not None:
                self._calibration.restore(state["calibration"], same_keys=same_keys)
                for part, bounds in self._calibration.bounds.items():
                    logger.info("resuming with correction.%s at %s, as calibrated.", format_part_path(part), bounds)
        if goes_on:
            logger.warning("resuming with the fallback of alarm %s active: %s", name, state["fallback"])
        elif name != CONFIGURED:
            logger.warning("the fallback of alarm %s was active; now the configured correction is active.", name)


def find_differences(config: DictConfig, state: Mapping[str, Any] | None) -> list[str]:
    """List the keys, with both values, in which this run differs from the checkpoint with this ``state``."""
    noted = {"target_kept": None} if state is None else state["calibrate"]
    unset = {"target_ess": None}
    found = find_changes(unset | noted, unset | bound_settings.read_noted_keys(config), bound_settings.SECTION)
    if state is None or state["fallback"] is None:
        return found
    name = state["alarms"]["in_force"]
    alarm = alarm_settings.read_settings(config).get(name)
    configured = alarm.fallback.to_mapping() if alarm is not None and alarm.fallback is not None else {}
    return found + find_changes(state["fallback"], configured, f"{alarm_settings.SECTION}.{name}.fallback")


def list_dependents(config: DictConfig) -> list[str]:
    """List the keys of features that continue from a checkpoint's state: moving bounds, and alarms with a fallback."""
    moves = bound_settings.read_noted_keys(config) != {"target_kept": None}
    alarms = [name for name, rule in alarm_settings.read_settings(config).items() if rule.fallback is not None]
    return [bound_settings.SECTION] * moves + [f"{alarm_settings.SECTION}.{name}.fallback" for name in alarms]
