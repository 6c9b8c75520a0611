"""Trainer's part of moving bounds: decides the bounds of the next update for every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from ...correction import CorrectionSpec, MaskSpec, Reduction, Statistic, WeightSpec
from ...correction.bounds import WEIGHT, Bounds, format_bounds, format_part_path, read_bounds, replace_bounds
from ...correction.statistics import merge_all
from .bound_settings import Settings, read_settings
from .histogram import (
    DISTANCE,
    ESS,
    KEPT,
    NOISE,
    compute_distances,
    compute_next_bounds,
    count_bins,
    find_moving_sides,
    find_obstacles,
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
    """The current bounds, and the statistics of the most recent updates.

    Args:
        settings: which bounds move, and how.
        spec: the configured correction.

    Attributes:
        spec: the correction with the bounds of the next update.
    """

    def __init__(self, settings: Settings, spec: CorrectionSpec) -> None:
        self.settings = settings
        self.spec = spec
        self._configured = spec
        self._window: list[dict[str, Statistic]] = []
        self._updates = 0
        self._hindered: dict[str, set[str]] = {}
        self._shown = self._compute_metrics({})

    @classmethod
    def from_config(cls, config: DictConfig, spec: CorrectionSpec) -> Calibration | None:
        """Build the calibration from a composed configuration; None if nothing is calibrated."""
        settings = read_settings(config, spec)
        return None if settings is None else cls(settings, spec)

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
        other = {name for name, left in bounds.items() if _find_open(left) != _find_open(here[name])}
        if same_keys and other:
            raise ValueError(
                f"calibration.bounds of {sorted(other)} are open on other sides than the correction's bounds"
            )
        for name in sorted(other):
            logger.warning(
                "correction.%s: the checkpoint has the bounds %s, with other keys, so the bounds start at %s, as "
                "configured.",
                format_part_path(name),
                format_bounds(bounds[name]),
                format_bounds(here[name]),
            )
        self.spec = replace_bounds(self.spec, {name: left for name, left in bounds.items() if name not in other})
        if same_keys:
            self._check_range()
        window = state["window"] if same_keys and not other else []
        self._window = [_from_plain(seen) for seen in window][-self.settings.window :]
        self._updates = int(state["updates"])
        self._shown = self._compute_metrics({})

    def _check_range(self) -> None:
        """Check that each bound has a value that its schedule could have reached.

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
                    raise ValueError(
                        f"calibration.bounds.{name}={format_bounds(self.bounds[name])} is out of its range"
                    )

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
            evidence = (configured[name], current[name], histogram, read_histogram(seen, f"{name}/{NOISE}"))
            moved[name] = compute_next_bounds(schedule, *evidence)
            self._warn(name, find_obstacles(schedule, *evidence))
        before, self.spec = self.bounds, replace_bounds(self.spec, moved)
        for name, bounds in self.bounds.items():
            if bounds != before[name]:
                logger.info(
                    "correction.%s: %s -> %s from the next update on. %s",
                    format_part_path(name),
                    format_bounds(before[name]),
                    format_bounds(bounds),
                    self._explain(name, seen[_name_outcome(name)]),
                )

    def _explain(self, name: str, outcome: Statistic) -> str:
        """Explain a change of bounds by the effect that the previous bounds had over the window."""
        updates, target = f"{len(self._window)} update(s)", f"{self.settings.schedules[name].target:g}"
        if name == WEIGHT:
            return (
                f"Its caps left an ESS of {outcome.value():.4f} of {float(outcome.parts[-1]):.0f} tokens in {updates}; "
                f"offpolicy.calibrate.target_ess={target}."
            )
        mask = dict(self.spec.masks)[name]
        units = _UNITS["token" if mask.picks_tokens else mask.level]
        return (
            f"Its bounds kept {outcome.value():.4f} of the {float(outcome.parts[-1]):.0f} {units} to which it "
            f"applies, in {updates}; offpolicy.calibrate.target_kept={target}."
        )

    def _warn(self, name: str, found: Mapping[str, str]) -> None:
        """Warn if something keeps a part's bounds from being updated; do not repeat the warning while this lasts."""
        for kind in sorted(set(found) - self._hindered.get(name, set())):
            logger.warning("correction.%s: %s", format_part_path(name), found[kind])
        self._hindered[name] = set(found)

    def _compute_metrics(self, merged: Mapping[str, Statistic]) -> dict[str, float]:
        shown: dict[str, float] = {}
        for name, part in _list_parts(self.spec).items():
            if (schedule := self.settings.schedules.get(name)) is None:
                continue
            shown_as = "weight" if name == WEIGHT else name
            # A weight of kind ``clip`` also has a lower bound, which never moves.
            for key in ("upper",) if name == WEIGHT else ("lower", "upper", "delta"):
                if (bound := getattr(part, key)) is not None:
                    shown[f"{shown_as}/{key}"] = bound
            outcome = _name_outcome(name)
            value = merged[outcome].value() if outcome in merged else float("nan")
            shown[f"{shown_as}/{outcome.rpartition('/')[2]}"] = value
            shown[f"{shown_as}/target"] = schedule.target
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


def _find_open(bounds: Bounds) -> dict[str, bool]:
    return {key: value is None for key, value in bounds.items()}


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
            raise ValueError(f"calibration.window.{name} holds no sums and counts of an update")
        found[name] = Statistic(reduction, tuple(parts))
    return found
