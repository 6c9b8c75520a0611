"""All alarms of a run, evaluated after each update, and the five metrics to watch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import Any, Final, Literal

from omegaconf import DictConfig, OmegaConf

from ..correction import CorrectionSpec, recommended
from ..correction.correction_parts import OF_THE_TRAINER
from ..correction.spec import format_bounds
from .alarm_settings import DEFAULTS, OF_EXTENSIONS, SECTION, AlarmSettings, read_settings

logger = logging.getLogger("verl.offpolicy")

GROWTH: Final = "mismatch_growth"
HEALTHY_KL: Final = 2e-3
"""Largest KL(mu, pi_old), in nats per token, between two healthy engines. Typical values for dense models are 1e-4 to
5e-4 in 16 bits, and 0.0013 to 0.0016 with one engine in bfloat16 and the other in float32
(docs/evidence/real_model.md)."""
WATCHED: Final[Mapping[str, str]] = {
    GROWTH: "the engines differ or weights arrive late: record a few steps (offpolicy.record.dir) and run "
    f"recipe.offpolicy.attribute; if data is stale, bound offpolicy.staleness.eta and use {recommended.LINE}",
    "ess": "few tokens carry the gradient: find the cause of kl/k3; do not raise the cap",
    "mean_weight": "mu and pi_old are far apart: proceed as for kl/k3",
    "kept_share": "the masks reject most of the batch: check mask/*/masked_token_share, and set their bounds with "
    "recipe.offpolicy.calibrate",
    "nonfinite": "a log-prob or an advantage is NaN or infinite: find it in nonfinite/*, and fix its source",
}
"""Alarm on the metric -> what to do if the alarm fires."""
_COUNTED: Final = ("rollout_log_prob", "old_log_prob", "log_prob", "advantages")
_SHOWN = 5  # largest number of values in a message


def find_statistic(name: str, spec: CorrectionSpec) -> str:
    """Return the name of the statistic that an alarm reads: a name under ``offpolicy/``, or an extension's.

    Without a weight, the alarm reads the statistic of the ratio that a weight would use. This is pi_old / mu, or pi /
    mu if pi_old does not come from the trainer's weights, because pi_old / mu then shows no mismatch.
    """
    trainers_own = spec.proximal in OF_THE_TRAINER
    ratio = "rollout_ratio" if trainers_own else "full_ratio"
    # Self-normalised weights always have mean 1.
    mean = "raw_weight/mean" if spec.normalized is not None else "weight/mean"
    statistics = {
        "ess": "weight/ess" if spec.all_weights else f"{ratio}/ess",
        "mean_weight": mean if spec.all_weights else f"{ratio}/mean",
        "kept_share": "keep/token_share",
        "nonfinite": "nonfinite",
        GROWTH: "kl/k3" if trainers_own else f"{ratio}/chi2",
    }
    return statistics[name] if name in statistics else OF_EXTENSIONS[name][1]


def read_value(name: str, spec: CorrectionSpec, values: Mapping[str, float]) -> float:
    """Read an alarm's value from the statistics of an update; NaN if it is missing."""
    if name == "nonfinite":
        found = [values[key] for what in _COUNTED if (key := f"nonfinite/{what}") in values]
        return sum(found) if found else math.nan
    return values.get(find_statistic(name, spec), math.nan)


def compute_growth(past: Sequence[float], value: float, *, history: int, least: float) -> float | None:
    """Compute ``value`` divided by the median of ``past``; None while fewer than ``history`` values are known.

    Args:
        past: mismatch of the previous updates, finite.
        least: lower limit that is applied to both the value and the median, so that growth from near zero is ignored.
    """
    if math.isnan(value):
        return math.nan
    return None if len(past) < history else max(value, least) / max(median(past), least)


def list_watched(spec: CorrectionSpec, alarms: Mapping[str, Any] = DEFAULTS) -> Iterator[tuple[str, str, str]]:
    """List the metrics, the healthy range of each, and what to do if a value is outside that range.

    Args:
        alarms: alarm name -> its keys as under ``offpolicy.alarms``.
    """
    for name, advice in WATCHED.items():
        metric = find_statistic(name, spec)
        bounds = format_bounds({side: alarms[name][side] for side in ("lower", "upper")})
        if name == GROWTH:
            bounds = f"{bounds} times its own median"
            bounds = f"<= {HEALTHY_KL:g} nats per token for fresh sequences, {bounds}" if metric == "kl/k3" else bounds
        yield f"offpolicy/{metric}{'/*' if name == 'nonfinite' else ''}", bounds, advice


def format_watched(spec: CorrectionSpec, config: DictConfig) -> Iterator[str]:
    """Format the lines that a run prints at its start."""
    yield "watch five metrics (details in docs/metrics.md):"
    given = OmegaConf.select(config, SECTION) or {}
    alarms = {name: {**values, **(given.get(name) or {})} for name, values in DEFAULTS.items()}
    for metric, bounds, advice in list_watched(spec, alarms):
        yield f"  {metric}: {bounds}; else {advice}"


@dataclass(frozen=True)
class AlarmState:
    """The counters of one alarm.

    Attributes:
        firing: the alarm has fired and has not re-armed.
        beyond: number of consecutive updates outside the band, up to and including the last update.
        calm: number of consecutive updates inside the recovery band, up to and including the last update.
        values: values of the most recent updates that ``beyond`` counts.
    """

    firing: bool = False
    beyond: int = 0
    calm: int = 0
    values: tuple[float, ...] = ()

    def advance(self, alarm: AlarmSettings, value: float) -> tuple[AlarmState, Literal["none", "fired", "recovered"]]:
        """Return the state after an update with ``value``, and the event that occurred."""
        inside = alarm.band.contains(value)
        state = replace(
            self,
            beyond=0 if inside else self.beyond + 1,
            calm=self.calm + 1 if alarm.recovery.contains(value) else 0,
            values=() if inside else (*self.values, value)[-_SHOWN:],
        )
        if not state.firing and state.beyond >= alarm.patience:
            return replace(state, firing=True), "fired"
        if state.firing and state.calm >= alarm.recovery_patience:
            return replace(state, firing=False), "recovered"
        return state, "none"


CONFIGURED = "configured"
_MEANINGS = {
    "ess": "few tokens or sequences carry the gradient",
    "mean_weight": "mu and the trainer's policy have drifted apart",
    "kept_share": "most of the batch is rejected",
    "nonfinite": "some log-probs are NaN or infinite",
    GROWTH: "the mismatch of the two engines has grown, for example because of stale weights or caches",
    "opd_overlap": "the teacher considers most sampled tokens nearly impossible, for example because its vocabulary, "
    "chat template or task differs",
}


class AlarmError(RuntimeError):
    """An alarm with ``action=stop`` fired; the message names the alarm, its values and the fix."""


class Alarms:
    """The alarms of one run, and the correction that is active because of them.

    Args:
        config: composed configuration of the run.

    Attributes:
        in_force: ``configured``, or the name of the alarm whose fallback the next update uses.
    """

    def __init__(self, config: DictConfig) -> None:
        self._alarms = read_settings(config)
        self._states = {name: AlarmState() for name in self._alarms}
        self._past: list[float] = []
        self._updates = 0
        self.in_force = self._ran = CONFIGURED

    @property
    def fallback(self) -> CorrectionSpec | None:
        """The active fallback correction; None if the configured correction is active."""
        return self.get_fallback(self.in_force)

    def judge(
        self, spec: CorrectionSpec, values: Mapping[str, float], extensions: Mapping[str, float] = MappingProxyType({})
    ) -> bool:
        """Evaluate every alarm on the statistics of one update that was made under ``spec``.

        Args:
            values: statistics under ``offpolicy/``; if empty, alarms on these statistics do not advance.
            extensions: metrics of extensions, by full name.

        Returns:
            True if the active correction has changed.

        Raises:
            AlarmError: an alarm with ``action=stop`` fired.
        """
        before = self._ran = self.in_force
        if not values and not extensions:
            return False
        self._updates += 1
        fired = []
        for name, alarm in self._alarms.items():
            found = extensions if name in OF_EXTENSIONS else values
            value = self._read_value(alarm, spec, found) if found else None
            if value is None:
                continue
            self._states[name], event = self._states[name].advance(alarm, value)
            if event == "fired":
                self._announce(alarm, spec)
                fired.append(name)
            elif event == "recovered":
                logger.info("alarm %s: %s is back at %.4g.", name, find_statistic(name, spec), value)
        self.in_force = self._choose()
        self._log_change(before, fired)
        if self.in_force != before:
            # Statistics change with the correction; only the engines' mismatch is the same under all corrections.
            self._states = {name: AlarmState(firing=state.firing) for name, state in self._states.items()}
        return self.in_force != before

    def metrics(self) -> dict[str, float]:
        """Return ``alarm/<name>``, 1 while firing, and ``alarm/active_correction``, the correction of the last update.

        0 means the configured correction, and n means the fallback of the n-th alarm that is on.
        """
        numbers = {name: float(place) for place, name in enumerate((CONFIGURED, *self._alarms))}
        firing = {f"alarm/{name}": float(state.firing) for name, state in self._states.items()}
        return firing | {"alarm/active_correction": numbers[self._ran]}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {
            "in_force": self.in_force,
            "updates": self._updates,
            "past": self._past,
            "alarms": {name: asdict(state) for name, state in self._states.items()},
            "rules": {name: alarm.to_mapping() for name, alarm in self._alarms.items()},
        }

    def restore(self, state: Mapping[str, Any], *, in_force: str | None = None) -> None:
        """Restore a checkpoint's state; new alarms and alarms whose settings have changed start from scratch.

        Args:
            in_force: value of the attribute ``in_force``, if it differs from the value in ``state``.
        """
        self._past = [float(value) for value in state["past"]]
        self._updates = int(state["updates"])
        self.in_force = self._ran = state["in_force"] if in_force is None else in_force
        switched = self.in_force != state["in_force"]
        for name, alarm in self._alarms.items():
            known = state["alarms"].get(name)
            same = known is not None and state.get("rules", {}).get(name) == alarm.to_mapping()
            # A firing alarm whose fallback is not active is reset, because it could otherwise never fire again.
            unheard = same and alarm.action == "fallback" and known["firing"] and self.in_force == CONFIGURED
            if not same or unheard:
                self._states[name] = AlarmState()
                if known is not None and known["firing"]:
                    logger.warning(
                        "alarm %s: it was firing at the checkpoint, and is reset because its settings have changed.",
                        name,
                    )
            elif switched:
                self._states[name] = AlarmState(firing=known["firing"])
            else:
                self._states[name] = AlarmState(**known | {"values": tuple(known["values"])})

    def get_fallback(self, name: str) -> CorrectionSpec | None:
        """Return the correction to which alarm ``name`` falls back; None if there is no such alarm."""
        alarm = self._alarms.get(name)
        return None if alarm is None else alarm.fallback

    def _read_value(self, alarm: AlarmSettings, spec: CorrectionSpec, values: Mapping[str, float]) -> float | None:
        value = read_value(alarm.name, spec, values)
        if alarm.name in OF_EXTENSIONS and math.isnan(value):
            return None  # for example opd without an eligible token
        if alarm.name != GROWTH:
            return value
        grown = compute_growth(self._past, value, history=alarm.window, least=alarm.least)
        # Values of a lasting fault are not added to the history, because they would become the normal level.
        healthy = grown is None or (alarm.band.contains(grown) and not self._states[alarm.name].firing)
        if healthy and math.isfinite(value):
            self._past = [*self._past, value][-alarm.window :]
        return grown

    def _choose(self) -> str:
        """Choose the next correction: the active fallback, otherwise the fallback of the first firing alarm."""
        if (holder := self._alarms.get(self.in_force)) is not None:
            state = self._states[holder.name]
            if holder.return_after is None or state.firing or state.calm < holder.return_after:
                return self.in_force
        firing = (n for n, alarm in self._alarms.items() if alarm.action == "fallback" and self._states[n].firing)
        return next(firing, CONFIGURED)

    def _log_change(self, before: str, fired: Sequence[str]) -> None:
        """Log which correction is active next, if any alarm ``fired`` or if the correction has changed."""
        if before not in (CONFIGURED, self.in_force):
            follows = (
                "the configured correction is active again from the next update, which must prove it live"
                if self.in_force == CONFIGURED
                else f"but alarm {self.in_force} fires"
            )
            logger.warning("alarm %s: quiet for %d updates, %s.", before, self._states[before].calm, follows)
        if self.in_force not in (CONFIGURED, before):
            alarm = self._alarms[self.in_force]
            forever = alarm.return_after is None
            logger.warning(
                "alarm %s: fallback [%s] is active from the next update, which must prove it live, and "
                "remains active %s.",
                alarm.name,
                ",".join(alarm.options),
                "for the rest of the run" if forever else f"until {alarm.return_after} quiet updates",
            )
        for name in fired:
            if self._alarms[name].action == "fallback" and not self.in_force == name != before:
                logger.warning(
                    "alarm %s: the fallback of alarm %s is already active, and stays active.", name, self.in_force
                )

    def _announce(self, alarm: AlarmSettings, spec: CorrectionSpec) -> None:
        state = self._states[alarm.name]
        shown = ", ".join(f"{value:.4g}" for value in state.values)
        more = "..., " if state.beyond > len(state.values) else ""
        over = f"{alarm.patience} consecutive updates" if alarm.patience > 1 else "an update"
        what = find_statistic(alarm.name, spec) + (" over its median" if alarm.name == GROWTH else "")
        sentence = (
            f"alarm {alarm.name}: {what} was {more}{shown} in {over}, up to update {self._updates} of the run, but "
            f"must be {alarm.band}: {_MEANINGS[alarm.name]}."
        )
        if alarm.action != "stop":
            logger.warning("%s", sentence)
            return
        other = (
            ""
            if alarm.name in OF_EXTENSIONS
            else f", with a safer correction and offpolicy.resume_changed_correction=true, or with "
            f"{SECTION}.{alarm.name}.action=fallback"
        )
        raise AlarmError(
            f"{sentence} {SECTION}.{alarm.name}.action=stop ends the run. The optimizer has already stepped on "
            f"these updates, and no checkpoint was written since the last of them: fix the cause, and resume from a "
            f"checkpoint that was written before the first of them{other}. If such values are expected, widen the "
            f"alarm's bounds."
        )


LEAST_KEPT = 0.1
LEAST_TOKENS = 100
"""Minimum number of stale tokens in an update that ``StaleRowsWatch`` checks."""
IN_A_ROW = 2
_AGES = ("is1", "is2", "ge3")


class StaleRowsWatch:
    """Warns, at most once, if a correction keeps almost none of the tokens that were sampled with older weights."""

    def __init__(self) -> None:
        self._low = 0

    def see(self, values: Mapping[str, float]) -> None:
        """Check the statistics of an update, under ``offpolicy/``."""
        counts = {age: values.get(f"staleness/{age}/token_count", 0.0) for age in _AGES}
        stale = sum(counts.values())
        if self._low >= IN_A_ROW or not stale >= LEAST_TOKENS:
            return
        shares = {age: values.get(f"staleness/{age}/keep_token_share", math.nan) for age in _AGES}
        kept = sum(count * shares[age] for age, count in counts.items() if count) / stale
        self._low = self._low + 1 if kept < LEAST_KEPT else 0
        if self._low == IN_A_ROW:
            logger.warning(
                "the correction keeps %.3f of the tokens that were sampled with older weights, %d in this update: "
                "bounds that "
                "were chosen for two engines with equal weights reject stale sequences. Use %s instead, or calibrate "
                "the bounds on "
                "a recording.",
                *(kept, stale, recommended.LINE),
            )
