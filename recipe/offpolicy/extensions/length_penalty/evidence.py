"""A second statement of the penalties and of verl's baselines, by row, for the proof alone: it asks no other code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .settings import LengthSettings

RESOLUTION = 2.0**-23
"""Of float32, in which verl subtracts means."""


class Row(NamedTuple):
    """A rollout of the group in question; ``anchor``: the length that it is held against, None without one."""

    tokens: float
    right: bool
    score: float
    anchor: float | None


def state_penalties(rows: Sequence[Row], settings: LengthSettings, weight: float) -> list[float]:
    """State what each row of one group loses before normalisation."""
    if settings.zero_variance == "skip" and min(row.score for row in rows) == max(row.score for row in rows):
        return [0.0] * len(rows)
    shortest, longest = min(row.tokens for row in rows), max(row.tokens for row in rows)
    stated = []
    for row in rows:
        lost = 0.0
        if settings.kind == "uniform":
            lost = settings.coefficient * row.tokens
        elif settings.kind == "group" and longest > shortest:
            above_middle = (2 * row.tokens - longest - shortest) / (2 * (longest - shortest))
            lost = settings.coefficient * (above_middle if row.right or above_middle > 0 else 0.0)
        elif settings.kind in ("anchor", "reference") and row.anchor is not None and row.tokens > row.anchor:
            lost = settings.coefficient * (row.tokens / row.anchor - 1)
        if settings.applies_to == "correct" and not row.right:
            lost = 0.0
        stated.append(weight * max(-settings.most, min(settings.most, lost)))
    return stated


def state_shift(rows: Sequence[Row], settings: LengthSettings, weight: float, *, by_std: bool) -> list[float]:
    """State what each row's advantage loses after normalisation."""
    lost = state_penalties(rows, settings, weight)
    middle = sum(lost) / len(lost)
    spread = _spread([row.score for row in rows]) if by_std else 0.0
    divisor = spread + 1e-6 if spread > 0 else 1.0
    return [(each - middle) / divisor for each in lost]


def state_advantages(rewards: Sequence[float], *, estimator: str, by_std: bool) -> list[float]:
    """State verl's advantages of one group, by GRPO or RLOO."""
    count = len(rewards)
    if estimator.startswith("rloo"):
        total = sum(rewards)
        return [each - (total - each) / (count - 1) if count > 1 else each for each in rewards]
    middle = sum(rewards) / count if count > 1 else 0.0
    divisor = (_spread(rewards) if count > 1 else 1.0) + 1e-6 if by_std else 1.0
    return [(each - middle) / divisor for each in rewards]


def bound_error(rewards: Sequence[float], *, by_std: bool) -> float:
    """Bound the error of verl's advantages in float32: rewards that are nearly equal are divided by a small number."""
    largest = max(abs(each) for each in rewards)
    divisor = _spread(rewards) + 1e-6 if by_std and len(rewards) > 1 else 1.0
    return 1e-5 + 8 * RESOLUTION * largest * (1 + 1 / divisor)


def _spread(values: Sequence[float]) -> float:
    """Sample standard deviation."""
    if len(values) < 2:
        return 0.0
    middle = sum(values) / len(values)
    return (sum((each - middle) ** 2 for each in values) / (len(values) - 1)) ** 0.5
