"""Values on the device that are read later. This is the only module of the package that copies results to the host.

A transfer of any size makes the host wait for all work queued on the device. Functions that measure something therefore
return a ``DeferredValue``, and ``fetch`` copies any number of these values together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import Statistic

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
        >>> from .statistics import Reduction
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
