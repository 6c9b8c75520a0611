"""Metrics of a run as verl's file logger wrote them, and the verdict on them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

REWARD = "critic/rewards/mean|critic/score/mean"
"""Of a key with alternatives the first that is there counts."""
KL, KEPT = "offpolicy/kl/k3", "offpolicy/keep/token_share"
ESS, RATIO_ESS = "offpolicy/weight/ess", "offpolicy/rollout_ratio/ess"
PROVED, SECONDS = "offpolicy/live/proved", "timing_s/step"
FIRST_VALUE = "process_reward/value/first/mean"

OK, FAILED, REFUSED, NOT_RISEN, NOT_LIVE = range(5)
"""Exit codes of scripts/quickstart.sh; an interrupted run ends with 128 + the signal's number."""
REQUIRED_RISE = 0.1


def pick(data: dict[str, Any], key: str) -> float:
    """Return the value of a key; NaN when it is not there."""
    return next((float(data[each]) for each in key.split("|") if data.get(each) is not None), math.nan)


def read_heldout_score(data: dict[str, Any]) -> float | None:
    """Return verl's own validation score; None when the step was not validated.

    The spelling task grades answers: right letters earn credit, so its score is above the share of exact matches.

    It is `val-core/<source>/<name>/mean@N` of N answers to each question.
    """
    return _read_validation(data, r"val-core/.+/mean@\d+")


def read_exact_share(data: dict[str, Any]) -> float | None:
    """Return the share of held-out answers that match to the letter; None where the reward does not say."""
    return _read_validation(data, r"val-aux/.+/exact/mean@\d+")


def _read_validation(data: dict[str, Any], pattern: str) -> float | None:
    return next((float(value) for key, value in data.items() if re.fullmatch(pattern, key)), None)


@dataclass
class History:
    """(step, metrics) in the order in which they were written."""

    records: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def add(self, lines: Iterable[str]) -> list[tuple[int, dict[str, Any]]]:
        """Append lines of the file logger, and return what they say."""
        new = [(line["step"], line["data"]) for line in map(json.loads, lines)]
        self.records += new
        return new

    @property
    def steps(self) -> list[int]:
        """Steps at which the policy was updated."""
        return [step for step, data in self.records if not math.isnan(pick(data, REWARD))]

    def series(self, key: str) -> list[float]:
        """Return one value for each of `steps`, NaN where it was not logged."""
        return [pick(data, key) for _, data in self.records if not math.isnan(pick(data, REWARD))]

    @property
    def heldout(self) -> dict[str, list[tuple[int, float]]]:
        """(step, value) of each validation by what was measured, exact match first; a second one is a graded score."""
        found: dict[str, list[tuple[int, float]]] = {}
        for name, read in (("exact match", read_exact_share), ("score", read_heldout_score)):
            values = [(step, value) for step, data in self.records if (value := read(data)) is not None]
            if values or name == "score":
                found["graded score" if found else name] = values
        return found

    @property
    def ess(self) -> str:
        """Key of the effective sample size: of the weights, or of the ratio where weights are all 1."""
        weights = [value for value in self.series(ESS) if not math.isnan(value)]
        return RATIO_ESS if all(value == 1.0 for value in weights) else ESS

    @property
    def proved(self) -> bool:
        """True if the worker's gradient was seen to carry the correction."""
        return any(data.get(PROVED) == 1.0 for _, data in self.records)


def judge(history: History, *, corrected: bool, judged: bool, scored: bool = True) -> tuple[int, str]:
    """Judge a run that ended by itself: exit code and sentence.

    Args:
        corrected: a correction is configured, so its proof of life must be there.
        judged: the score must have risen by REQUIRED_RISE; False for fewer steps, or another model or task than ours.
        scored: the held-out score was asked for, before training and after it.
    """
    *_, (judged_by, scores) = history.heldout.items()
    if not history.steps:
        return FAILED, "training ended without a step"
    if scored and len(scores) < 2:
        return FAILED, "training ended without the held-out score before and after it"
    if corrected and not history.proved:
        return NOT_LIVE, "the correction was not proved live: offpolicy/live/proved is not 1"
    if not scored:
        return OK, f"trained {len(history.steps)} steps (not judged: validation is switched off)"
    changes = [f"{name} from {each[0][1]:.3f} to {each[-1][1]:.3f}" for name, each in history.heldout.items()]
    change = f"held out, {' and '.join(changes)}"
    if not judged:
        return OK, f"{change} (not judged: fewer steps than the default, or another model or task)"
    if scores[-1][1] - scores[0][1] < REQUIRED_RISE:
        return NOT_RISEN, f"{change}: the {judged_by} must rise by {REQUIRED_RISE}"
    return OK, change
