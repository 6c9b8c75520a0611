"""A second, per-row implementation of the penalties and of verl's baselines, for the proof; it shares no other code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .settings import LengthSettings

RESOLUTION = 2.0**-23
"""Rounding of float32, in which verl subtracts means."""
SMALLEST = 2.0**-126
"""Smallest normal number of float32, below which float32's resolution is no longer relative."""
EQUAL = 8 * RESOLUTION
"""Standard deviation up to which rewards count as equal, relative to the largest reward."""


class Row(NamedTuple):
    """One rollout of a group; ``anchor`` is the length with which the rollout is compared, or None."""

    tokens: float
    right: bool
    score: float
    anchor: float | None


def state_penalties(rows: Sequence[Row], settings: LengthSettings, weight: float) -> list[float]:
    """Compute the penalty of each row of one group, before normalisation."""
    if settings.zero_variance == "skip":
        weight *= _state_difference([row.score for row in rows])
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
            lost = settings.coefficient * (row.tokens - row.anchor) / max(1.0, row.anchor)
        if settings.applies_to == "correct" and not row.right:
            lost = 0.0
        bound = float("inf") if settings.most is None else settings.most
        stated.append(weight * max(-bound, min(bound, lost)))
    return stated


def state_shift(rows: Sequence[Row], settings: LengthSettings, weight: float, *, by_std: bool) -> list[float]:
    """Compute the decrease of each row's advantage after normalisation."""
    lost = state_penalties(rows, settings, weight)
    middle = sum(lost) / len(lost)
    apart = [each - middle for each in lost]
    scores = [row.score for row in rows]
    differ = _state_difference(scores) if by_std else 0.0
    if not differ or not any(apart):
        return apart
    # The shift is divided like verl's advantages, but it is limited to the larger of two values: the largest of these
    # advantages, and the undivided shift.
    whole = [each / (_spread(scores) + 1e-6) for each in apart]
    middle, deviation = sum(scores) / len(scores), _spread(scores)
    most = max(max(map(abs, apart)), differ * max(abs(each - middle) for each in scores) / (deviation + 1e-6))
    shrink = min(1.0, most / max(map(abs, whole)))
    return [differ * shrink * one + (1 - differ) * other for one, other in zip(whole, apart, strict=True)]


def state_advantages(rewards: Sequence[float], *, estimator: str, by_std: bool) -> list[float]:
    """Compute the advantages that verl's GRPO or RLOO computes for one group."""
    count = len(rewards)
    if estimator.startswith("rloo"):
        total = sum(rewards)
        return [each - (total - each) / (count - 1) if count > 1 else each for each in rewards]
    middle = sum(rewards) / count if count > 1 else 0.0
    divisor = (_spread(rewards) if count > 1 else 1.0) + 1e-6 if by_std else 1.0
    return [(each - middle) / divisor for each in rewards]


def bound_error(rewards: Sequence[float], *, by_std: bool) -> float:
    """Bound the float32 error of verl's advantages; it is large if nearly equal rewards make the divisor small."""
    largest = max(abs(each) for each in rewards)
    divisor = _spread(rewards) + 1e-6 if by_std and len(rewards) > 1 else 1.0
    return 1e-5 + 8 * RESOLUTION * largest * (1 + 1 / divisor)


def _state_difference(rewards: Sequence[float]) -> float:
    """Return how certainly rewards differ, from 0 (rounding explains the difference) to 1 (rounding cannot)."""
    rounding = EQUAL * max(SMALLEST, *map(abs, rewards))
    return min(1.0, max(0.0, _spread(rewards) / rounding - 1)) if len(rewards) > 1 else 0.0


def _spread(values: Sequence[float]) -> float:
    """Compute the sample standard deviation."""
    if len(values) < 2:
        return 0.0
    middle = sum(values) / len(values)
    return (sum((each - middle) ** 2 for each in values) / (len(values) - 1)) ** 0.5
