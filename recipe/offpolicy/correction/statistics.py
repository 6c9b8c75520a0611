"""Statistics that carry their own reduction, so that micro-batches and ranks add up to the whole batch.

A mean travels as a sum and a count, an effective sample size as two sums and a count. Nothing is averaged twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor


class Reduction(Enum):
    """Rule by which two statistics of one name are merged; the comments give the parts."""

    SUM = "sum"  # (total,)
    MEAN = "mean"  # (total, count)
    STD = "std"  # (total, square, count), taken about 1 for ratios and about 0 otherwise
    ESS = "ess"  # (total, square, count), taken about 1
    CHI2 = "chi2"  # (total, square, count), taken about 1
    PERPLEXITY = "perplexity"  # (total of log-probs, count)
    MIN = "min"  # (value, count), the value without meaning where nothing is counted
    MAX = "max"  # (value, count), likewise


@dataclass(frozen=True)
class Statistic:
    """A metric as mergeable partial sums.

    Attributes:
        reduction: how parts become one.
        parts: 0-dim float64 tensors where it is taken, floats once it has left the device.
        about: what has been subtracted from each value before its mean, least or greatest was taken.
    """

    reduction: Reduction
    parts: tuple[Tensor | float, ...]
    about: float = 0.0

    def merge(self, *others: Statistic) -> Statistic:
        """Merge with the statistics of other samples (host side), in one pass over all of them."""
        every = (self, *others)
        if wrong := {one.reduction for one in others} - {self.reduction}:
            raise ValueError(f"cannot merge {self.reduction.value} with {wrong.pop().value}")
        parts = list(zip(*(one.parts for one in every), strict=True))
        if self.reduction in (Reduction.MIN, Reduction.MAX):
            extreme = min if self.reduction is Reduction.MIN else max
            counted = [value for value, count in zip(*parts, strict=True) if count]
            return replace(self, parts=(extreme(counted) if counted else self.parts[0], sum(parts[1])))
        return replace(self, parts=tuple(map(sum, parts)))

    def value(self) -> float:
        """Compute the number to log; NaN for a statistic of nothing, except that a sum of nothing is 0."""
        parts = [float(part) for part in self.parts]
        match self.reduction:
            case Reduction.SUM:
                return parts[0]
            case _ if not parts[-1]:
                return math.nan
            case Reduction.MIN | Reduction.MAX:
                return self.about + parts[0]
            case Reduction.MEAN:
                return self.about + parts[0] / parts[1]
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
                weights, squares = count + total, count + 2 * total + square
                return weights * weights / (count * squares) if squares > 0 else math.nan


@dataclass(frozen=True)
class Moments:
    """Partial sums of a sample of weights w, taken of w - 1, which keeps its digits where w is near 1.

    Each a 0-dim float64 tensor.

    Attributes:
        excess: sum of w - 1.
        square: sum of (w - 1)^2.
        count: how many weights.
        least, greatest: of w - 1; of no meaning for no weight.
    """

    excess: Tensor
    square: Tensor
    count: Tensor
    least: Tensor
    greatest: Tensor

    def build_statistics(self, name: str) -> dict[str, Statistic]:
        """Build mean, std, min, max, ess and chi2 under ``name``."""
        sums = (self.excess, self.square, self.count)
        return {
            f"{name}/mean": Statistic(Reduction.MEAN, (self.excess, self.count), about=1.0),
            f"{name}/std": Statistic(Reduction.STD, sums),
            f"{name}/min": Statistic(Reduction.MIN, (self.least, self.count), about=1.0),
            f"{name}/max": Statistic(Reduction.MAX, (self.greatest, self.count), about=1.0),
            f"{name}/ess": Statistic(Reduction.ESS, sums),
            f"{name}/chi2": Statistic(Reduction.CHI2, sums),
        }


def build_sum(value: Tensor) -> Statistic:
    """Build a statistic that is a sum.

    Example:
        >>> import torch
        >>> build_sum(torch.tensor(3.0)).value()
        3.0
    """
    return Statistic(Reduction.SUM, (value,))


def build_mean(value: Tensor, count: Tensor, about: float = 0.0) -> Statistic:
    """Build a mean, or a share of a whole, from a sum and a count.

    Example:
        >>> import torch
        >>> build_mean(torch.tensor(3.0), torch.tensor(4.0)).value()
        0.75
    """
    return Statistic(Reduction.MEAN, (value, count), about)


def merge_all(samples: Iterable[Mapping[str, Statistic]]) -> dict[str, Statistic]:
    """Merge statistics by name over micro-batches, mini-batches and ranks (host side).

    Example:
        >>> parts = [{"x": Statistic(Reduction.MEAN, (2.0, 1.0))}, {"x": Statistic(Reduction.MEAN, (1.0, 2.0))}]
        >>> merge_all(parts)["x"].value()  # (2 + 1) / (1 + 2)
        1.0
    """
    by_name: dict[str, list[Statistic]] = {}
    for sample in samples:
        for name, statistic in sample.items():
            by_name.setdefault(name, []).append(statistic)
    return {name: found[0].merge(*found[1:]) if len(found) > 1 else found[0] for name, found in by_name.items()}


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
