"""Statistics that add up over micro-batches and ranks, and their copy to the host.

A mean is sent as a sum and a count, and an effective sample size as two sums and a count. Nothing is averaged twice.

A transfer of any size makes the host wait for all work queued on the device. Functions that measure something therefore
return a ``DeferredValue``, and ``fetch`` copies any number of these values together. No other module of this package
copies results to the host.
"""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor


class Reduction(Enum):
    """Rule by which two statistics with the same name are merged; the comments list the parts."""

    SUM = "sum"  # (total,)
    MEAN = "mean"  # (total, count)
    STD = "std"  # (total, square, count), taken about 1 for ratios and about 0 otherwise
    ESS = "ess"  # (total, square, count), taken about 1
    CHI2 = "chi2"  # (total, square, count), taken about 1
    PERPLEXITY = "perplexity"  # (total of log-probs, count)
    MIN = "min"  # (value, count), the value is meaningless if the count is 0
    MAX = "max"  # (value, count), as for MIN


_EXTREMES: Final = (Reduction.MIN, Reduction.MAX)
_LEAST_SQUARE: Final = 2.0**-40
"""The effective sample size is NaN if the mean square of the weights is at most this value, because moments about 1 are
rounded to 2^-52 per weight."""


@dataclass(frozen=True)
class Statistic:
    """A metric as mergeable partial sums.

    Attributes:
        reduction: rule by which parts are merged.
        parts: 0-dim float64 tensors on the device, floats once the statistic has been copied to the host.
        about: number that was subtracted from each value before the mean, minimum or maximum was computed.
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
        """Compute the number to log; NaN for a statistic without values, but 0 for a sum."""
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
                # E[w^2] - 1 = E[(w-1)^2] + 2 E[w-1]: no number near 1 is subtracted from 1.
                return (square + 2 * total) / count
            case _:
                # (sum w)^2 / (n sum w^2), in (0, 1]: the share of the sample that is effective under the weights.
                weights, squares = count + total, count + 2 * total + square
                return weights * weights / (count * squares) if squares > _LEAST_SQUARE * count else math.nan


T = TypeVar("T")


@dataclass(frozen=True)
class DeferredValue(Generic[T]):
    """A measurement on the device, with the function that decodes it on the host.

    Attributes:
        numbers: (n,) float64 or int64, detached, on the device.
        decode: converts the numbers, in this order and on the host, to the value; may raise an exception if they
            indicate an error.
    """

    numbers: Tensor
    decode: Callable[[list[Any]], T]


def fetch(values: Sequence[DeferredValue[Any]]) -> list[Any]:
    """Copy all values to the host in one transfer and decode each.

    Args:
        values: values on one device.

    Example:
        >>> fetch([DeferredValue(torch.tensor([1, 2]), sum), DeferredValue(torch.tensor([0.5]).double(), max)])
        [3, 0.5]
    """
    if not values:
        return []
    # The bits of both dtypes are copied as integers, so that nothing is rounded.
    host = torch.cat([value.numbers.view(torch.int64) for value in values]).cpu()
    parts = host.split([len(value.numbers) for value in values])
    return [value.decode(part.view(value.numbers.dtype).tolist()) for value, part in zip(values, parts, strict=True)]


def defer_statistics(statistics: Mapping[str, Statistic]) -> DeferredValue[dict[str, Statistic]]:
    """Defer statistics whose parts are tensors; a part that several statistics share is copied once.

    Args:
        statistics: statistics whose parts are detached float64 tensors or floats.

    Example:
        >>> count = torch.tensor(4.0, dtype=torch.float64)
        >>> mean = Statistic(Reduction.MEAN, (torch.tensor(2.0, dtype=torch.float64), count))
        >>> (statistics,) = fetch([defer_statistics({"x": mean, "n": Statistic(Reduction.SUM, (count,))})])
        >>> statistics["x"].value(), statistics["n"].value()
        (0.5, 4.0)
    """
    places: dict[int, int] = {}
    parts: list[Tensor] = []
    for statistic in statistics.values():
        for part in statistic.parts:
            if isinstance(part, Tensor) and id(part) not in places:
                places[id(part)] = len(parts)
                parts.append(part)
    kept = dict(statistics)

    def decode(numbers: list[float]) -> dict[str, Statistic]:
        def number(part: Tensor | float) -> float:
            return numbers[places[id(part)]] if isinstance(part, Tensor) else part

        return {name: Statistic(one.reduction, tuple(map(number, one.parts)), one.about) for name, one in kept.items()}

    if not parts:
        return DeferredValue(torch.zeros(0, dtype=torch.float64), decode)
    return DeferredValue(torch.stack(parts), decode)


class FlatStatistics(Mapping[str, Statistic]):
    """Statistics by name, stored in only two plain objects regardless of their number: a layout and the numbers.

    One object per rank and statistic would make garbage collection slower than the computation itself. A
    layout is unpickled only once, because ranks and steps usually share it.

    Attributes:
        layout: the pickled statistics without their parts, and the position of each part among the numbers.
        numbers: numbers of all parts; statistics with the same parts and the same reduction share the same numbers.
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
    """Flatten statistics that are on the host; an empty or flat mapping is returned unchanged.

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
    held = dict(statistics)  # keeps the objects alive, so that their ids stay unique
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

    Statistics with the same reduction that share their parts in every sample also share them in the result.

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
    """Merge statistics with the same layout, number by number."""
    columns = list(zip(*(sample.numbers for sample in samples), strict=True))
    # This uses Python's sum, in the order of the samples, as ``Statistic.merge`` does.
    sums = tuple(map(sum, columns))
    return {
        name: replace(one, parts=_find_extreme(one.reduction, *columns[at]) if one.reduction in _EXTREMES else sums[at])
        for name, (one, at) in _read_layout(samples[0].layout).items()
    }


def _find_extreme(reduction: Reduction, values: Sequence[Any], counts: Sequence[Any]) -> tuple[Any, Any]:
    """Return the least or greatest value whose count is not 0 (the first if all counts are 0), and the total count."""
    extreme = min if reduction is Reduction.MIN else max
    counted = [value for value, count in zip(values, counts, strict=True) if count]
    return extreme(counted) if counted else values[0], sum(counts)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


BUCKETS: Final = {"le16": 16, "le64": 64, "le256": 256, "le1024": 1024, "le4096": 4096, "gt4096": None}
"""Length bucket -> largest number of valid tokens in its rows; None: no limit."""

SIGNS: Final = ("positive", "negative")
TURNS: Final = ("first", "post_tool")
STALENESS: Final = ("is0", "is1", "is2", "ge3")
