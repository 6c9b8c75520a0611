"""Statistics that carry their own reduction, so that micro-batches and ranks add up to the whole batch.

A mean travels as a sum and a count, an effective sample size as two sums and a count. Nothing is averaged twice.
"""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final

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


_EXTREMES: Final = (Reduction.MIN, Reduction.MAX)


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
        columns = list(zip(*(one.parts for one in every), strict=True))
        if self.reduction in _EXTREMES:
            return replace(self, parts=_find_extreme(self.reduction, *columns))
        return replace(self, parts=tuple(map(sum, columns)))

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


class FlatStatistics(Mapping[str, Statistic]):
    """Statistics by name as two plain objects, however many they are: their layout and their numbers.

    So they travel: as objects, the statistics of all ranks are so many that the garbage collector takes longer than
    what is computed of them. A layout is read once, since ranks and steps have the same as a rule.

    Attributes:
        layout: the pickled statistics without parts, and the places of these among the numbers.
        numbers: of all parts; statistics that share both parts and reduction share their places.
    """

    def __init__(self, layout: bytes, numbers: bytes) -> None:
        self.layout, self.numbers = layout, array("d", numbers)

    def __reduce__(self) -> tuple[type[FlatStatistics], tuple[bytes, bytes]]:
        return FlatStatistics, (self.layout, self.numbers.tobytes())

    def __getitem__(self, name: str) -> Statistic:
        one, at = _read_layout(self.layout)[name]
        return replace(one, parts=tuple(self.numbers[at]))

    def __iter__(self) -> Iterator[str]:
        return iter(_read_layout(self.layout))

    def __len__(self) -> int:
        return len(_read_layout(self.layout))


def flatten(statistics: Mapping[str, Statistic]) -> Mapping[str, Statistic]:
    """Flatten statistics that have left the device; an empty or flat mapping is returned as it is.

    Example:
        >>> flat = flatten({"x": Statistic(Reduction.MEAN, (2.0, 1.0)), "n": Statistic(Reduction.SUM, (3.0,))})
        >>> flat["x"].value(), list(flat.numbers)
        (2.0, [2.0, 1.0, 3.0])
    """
    if isinstance(statistics, FlatStatistics) or not statistics:
        return statistics
    numbers = array("d")
    places: dict[tuple[Reduction, int], slice] = {}
    layout = {}
    held = dict(statistics)  # by which an id stays that of one object
    for name, one in held.items():
        key = (one.reduction, id(one.parts))
        if key not in places:
            start = len(numbers)
            numbers.extend(map(float, one.parts))
            places[key] = slice(start, len(numbers))
        layout[name] = (replace(one, parts=()), places[key])
    return FlatStatistics(pickle.dumps(layout), numbers.tobytes())


@lru_cache(maxsize=16)
def _read_layout(layout: bytes) -> dict[str, tuple[Statistic, slice]]:
    read: dict[str, tuple[Statistic, slice]] = pickle.loads(layout)
    return read


def merge_all(samples: Iterable[Mapping[str, Statistic]]) -> dict[str, Statistic]:
    """Merge statistics by name over micro-batches, mini-batches and ranks (host side).

    Statistics of one reduction that share their parts in each sample share them afterwards.

    Example:
        >>> parts = [{"x": Statistic(Reduction.MEAN, (2.0, 1.0))}, {"x": Statistic(Reduction.MEAN, (1.0, 2.0))}]
        >>> merge_all(parts)["x"].value()  # (2 + 1) / (1 + 2)
        1.0
    """
    given = [sample for sample in samples if sample]
    flat = [sample for sample in given if isinstance(sample, FlatStatistics)]
    if len(given) == len(flat) > 1 and all(sample.layout == flat[0].layout for sample in flat):
        return _merge_columns(flat)
    by_name: dict[str, list[Statistic]] = {}
    for sample in given:
        for name, statistic in sample.items():
            by_name.setdefault(name, []).append(statistic)
    merged: dict[str, Statistic] = {}
    shared: dict[tuple[Any, ...], Statistic] = {}
    for name, found in by_name.items():
        first, *others = found
        key = tuple((one.reduction, id(one.parts)) for one in found)
        if not others:
            merged[name] = first
        elif key in shared:
            merged[name] = replace(first, parts=shared[key].parts)
        else:
            merged[name] = shared[key] = first.merge(*others)
    return merged


def _merge_columns(samples: Sequence[FlatStatistics]) -> dict[str, Statistic]:
    """Merge statistics of one layout, each number with its like."""
    columns = list(zip(*(sample.numbers for sample in samples), strict=True))
    # Python's own sum, in the order of the samples, as in ``Statistic.merge``.
    sums = tuple(map(sum, columns))
    return {
        name: replace(one, parts=_find_extreme(one.reduction, *columns[at]) if one.reduction in _EXTREMES else sums[at])
        for name, (one, at) in _read_layout(samples[0].layout).items()
    }


def _find_extreme(reduction: Reduction, values: Sequence[Any], counts: Sequence[Any]) -> tuple[Any, Any]:
    """Find the least or greatest of the values that count; the first where none does. Its count is that of all."""
    extreme = min if reduction is Reduction.MIN else max
    counted = [value for value, count in zip(values, counts, strict=True) if count]
    return extreme(counted) if counted else values[0], sum(counts)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
