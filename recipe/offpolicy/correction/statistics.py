"""Statistics that carry their own reduction, so that micro-batches and ranks add up to the whole batch.

A mean travels as a sum and a count, an effective sample size as two sums and a count. Nothing is averaged twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor


class Reduction(Enum):
    """How two statistics of one name become one; the comment gives the parts."""

    SUM = "sum"  # (total,)
    MEAN = "mean"  # (total, count)
    STD = "std"  # (total, square, count), taken about 1 for ratios and about 0 otherwise
    ESS = "ess"  # (total, square, count)
    CHI2 = "chi2"  # (total, square, count), taken about 1
    PERPLEXITY = "perplexity"  # (total of log-probs, count)
    MIN = "min"  # (value,), +inf for nothing
    MAX = "max"  # (value,), -inf for nothing


@dataclass(frozen=True)
class Statistic:
    """Parts of a statistic: 0-dim float64 tensors where it is taken, floats once it has left the device."""

    reduction: Reduction
    parts: tuple[Tensor | float, ...]

    def merge(self, other: Statistic) -> Statistic:
        """The statistic of both samples together (host side)."""
        if self.reduction is not other.reduction:
            raise ValueError(f"cannot merge {self.reduction.value} with {other.reduction.value}")
        if self.reduction is Reduction.MIN:
            return replace(self, parts=(min(self.parts[0], other.parts[0]),))
        if self.reduction is Reduction.MAX:
            return replace(self, parts=(max(self.parts[0], other.parts[0]),))
        return replace(self, parts=tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def value(self) -> float:
        """The number to log; NaN for a statistic of nothing, except that a sum of nothing is 0."""
        parts = [float(part) for part in self.parts]
        match self.reduction:
            case Reduction.SUM:
                return parts[0]
            case Reduction.MIN | Reduction.MAX:
                return parts[0] if math.isfinite(parts[0]) else math.nan
            case _ if not parts[-1]:
                return math.nan
            case Reduction.MEAN:
                return parts[0] / parts[1]
            case Reduction.PERPLEXITY:
                return _exp(-parts[0] / parts[1])
        total, square, count = parts
        match self.reduction:
            case Reduction.STD:
                return math.sqrt(max(square / count - (total / count) ** 2, 0.0))
            case Reduction.CHI2:
                # E[w^2] - 1 = E[(w-1)^2] + 2 E[w-1]: nothing near 1 is subtracted from 1.
                return (square + 2 * total) / count
            case _:
                # (sum w)^2 / (n sum w^2), in (0, 1]: the share of the sample that the weights leave.
                return total * total / (count * square) if square else math.nan


@dataclass(frozen=True)
class Moments:
    """What all statistics of a sample of weights are made of, each a 0-dim float64 tensor.

    Attributes:
        excess: sum of w - 1, which keeps its digits where weights are near 1.
        square: sum of (w - 1)^2.
        count: how many weights.
        least, greatest: +inf and -inf for nothing.
    """

    excess: Tensor
    square: Tensor
    count: Tensor
    least: Tensor
    greatest: Tensor

    def statistics(self, name: str) -> dict[str, Statistic]:
        """Mean, std, min, max, ess and chi2 under ``name``."""
        about_1 = (self.excess, self.square, self.count)
        total = self.excess + self.count
        return {
            f"{name}/mean": Statistic(Reduction.MEAN, (total, self.count)),
            f"{name}/std": Statistic(Reduction.STD, about_1),
            f"{name}/min": Statistic(Reduction.MIN, (self.least,)),
            f"{name}/max": Statistic(Reduction.MAX, (self.greatest,)),
            f"{name}/ess": Statistic(Reduction.ESS, (total, self.square + self.excess + total, self.count)),
            f"{name}/chi2": Statistic(Reduction.CHI2, about_1),
        }


def total(value: Tensor) -> Statistic:
    """A sum."""
    return Statistic(Reduction.SUM, (value,))


def mean(value: Tensor, count: Tensor) -> Statistic:
    """A sum over a count: means, and shares of a whole."""
    return Statistic(Reduction.MEAN, (value, count))


def to_host(statistics: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """The same statistics in floats, moved by one packed transfer."""
    parts = [part for statistic in statistics.values() for part in statistic.parts]
    numbers = iter(torch.stack([torch.as_tensor(p).double() for p in parts]).tolist() if parts else [])
    return {
        name: replace(statistic, parts=tuple(next(numbers) for _ in statistic.parts))
        for name, statistic in statistics.items()
    }


def merge_all(samples: Iterable[Mapping[str, Statistic]]) -> dict[str, Statistic]:
    """Merge by name over micro-batches, mini-batches and ranks (host side)."""
    merged: dict[str, Statistic] = {}
    for sample in samples:
        for name, statistic in sample.items():
            merged[name] = merged[name].merge(statistic) if name in merged else statistic
    return merged


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
