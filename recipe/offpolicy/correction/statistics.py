"""Statistics that carry their own reduction, so that micro-batches and ranks add up to the whole batch.

A mean travels as a sum and a count, an effective sample size as two sums and a count. Nothing is averaged twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Reduction(Enum):
    """How two statistics of one name become one; the comment gives the parts."""

    SUM = "sum"  # (total,)
    MEAN = "mean"  # (total, count)
    STD = "std"  # (total, square, count), taken about 1 for ratios and about 0 otherwise
    ESS = "ess"  # (total, square, count)
    MIN = "min"  # (value,), +inf for nothing
    MAX = "max"  # (value,), -inf for nothing


@dataclass(frozen=True)
class Statistic:
    """Parts of a statistic: 0-dim tensors where it is taken, floats once it has left the device."""

    reduction: Reduction
    parts: tuple[Tensor | float, ...]

    def merge(self, other: Statistic) -> Statistic:
        """The statistic of both samples together (host side)."""
        if self.reduction is not other.reduction:
            raise ValueError(f"cannot merge {self.reduction.value} with {other.reduction.value}")
        if self.reduction is Reduction.MIN:
            return Statistic(self.reduction, (min(self.parts[0], other.parts[0]),))
        if self.reduction is Reduction.MAX:
            return Statistic(self.reduction, (max(self.parts[0], other.parts[0]),))
        return Statistic(self.reduction, tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def value(self) -> float:
        """The number to log; NaN for a statistic of nothing."""
        parts = [float(part) for part in self.parts]
        match self.reduction:
            case Reduction.SUM:
                return parts[0]
            case Reduction.MIN | Reduction.MAX:
                return parts[0] if math.isfinite(parts[0]) else math.nan
            case Reduction.MEAN:
                return parts[0] / parts[1] if parts[1] else math.nan
            case Reduction.STD:
                total, square, count = parts
                return math.sqrt(max(square / count - (total / count) ** 2, 0.0)) if count else math.nan
            case Reduction.ESS:
                # (sum w)^2 / (n sum w^2), in (0, 1]: the share of the sample that the weights leave.
                total, square, count = parts
                return total * total / (count * square) if count and square else math.nan


def total(values: Tensor) -> Statistic:
    """Sum of values."""
    return Statistic(Reduction.SUM, (_sum(values),))


def mean(values: Tensor, where: Tensor) -> Statistic:
    """Mean of values where the mask is true."""
    return Statistic(Reduction.MEAN, (_sum(_only(values, where)), _sum(where)))


def share(part: Tensor, whole: Tensor) -> Statistic:
    """Count of true in ``part`` over count of true in ``whole``."""
    return Statistic(Reduction.MEAN, (_sum(part), _sum(whole)))


def std(values: Tensor, where: Tensor, *, about: float = 0.0) -> Statistic:
    """Standard deviation where the mask is true; ``about`` is a guess of the mean that keeps float64 exact."""
    deviation = _only(values.double() - about, where)
    return Statistic(Reduction.STD, (_sum(deviation), _sum(deviation.square()), _sum(where)))


def effective_sample_size(weights: Tensor, where: Tensor) -> Statistic:
    """Normalised effective sample size of weights where the mask is true."""
    weights = _only(weights.double(), where)
    return Statistic(Reduction.ESS, (_sum(weights), _sum(weights.square()), _sum(where)))


def minimum(values: Tensor, where: Tensor) -> Statistic:
    """Least value where the mask is true."""
    return Statistic(Reduction.MIN, (_extreme(values, where, math.inf).amin(),))


def maximum(values: Tensor, where: Tensor) -> Statistic:
    """Greatest value where the mask is true."""
    return Statistic(Reduction.MAX, (_extreme(values, where, -math.inf).amax(),))


def to_host(statistics: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """The same statistics in floats, moved by one packed transfer."""
    parts = [part for statistic in statistics.values() for part in statistic.parts]
    numbers = iter(torch.stack([torch.as_tensor(p).double() for p in parts]).tolist() if parts else [])
    return {
        name: Statistic(statistic.reduction, tuple(next(numbers) for _ in statistic.parts))
        for name, statistic in statistics.items()
    }


def merge_all(samples: Iterable[Mapping[str, Statistic]]) -> dict[str, Statistic]:
    """Merge by name over micro-batches, mini-batches and ranks (host side)."""
    merged: dict[str, Statistic] = {}
    for sample in samples:
        for name, statistic in sample.items():
            merged[name] = merged[name].merge(statistic) if name in merged else statistic
    return merged


def _only(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _extreme(values: Tensor, where: Tensor, empty: float) -> Tensor:
    chosen = torch.where(where, values.double(), torch.full((), empty, dtype=torch.float64, device=values.device))
    # The appended value stands for an empty batch, whose amin and amax are undefined.
    return torch.cat([chosen.flatten(), chosen.new_full((1,), empty)])
