"""Numbers that stay on the device until somebody has to know them: the one place where they leave it.

A transfer makes the host wait for everything that the device still has to do, whatever its size. So whatever measures
something returns a ``Reading``, readings are kept, and ``fetch`` brings any number of them over together.
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
class Reading(Generic[T]):
    """Something measured.

    Attributes:
        numbers: (n,) float64 or int64, detached, on the device.
        says: what they mean, from the numbers on the host, in that order; it may raise where they say that something
            is wrong.
    """

    numbers: Tensor
    says: Callable[[list[Any]], T]


def fetch(readings: Sequence[Reading[Any]]) -> list[Any]:
    """What each of them says, by one transfer to the host for all together.

    Args:
        readings: of one device.
    """
    if not readings:
        return []
    # Bits of both dtypes travel as integers, which nothing rounds on the way.
    host = torch.cat([reading.numbers.view(torch.int64) for reading in readings]).cpu()
    parts = host.split([len(reading.numbers) for reading in readings])
    return [
        reading.says(part.view(reading.numbers.dtype).tolist()) for reading, part in zip(readings, parts, strict=True)
    ]


def of_statistics(statistics: Mapping[str, Statistic]) -> Reading[dict[str, Statistic]]:
    """The same statistics in floats; a part that several of them share travels once, one that is a float does not.

    Args:
        statistics: with parts of float64, detached, or floats.
    """
    places: dict[int, int] = {}
    parts: list[Tensor] = []
    for statistic in statistics.values():
        for part in statistic.parts:
            if isinstance(part, Tensor) and id(part) not in places:
                places[id(part)] = len(parts)
                parts.append(part)
    kept = dict(statistics)

    def says(numbers: list[float]) -> dict[str, Statistic]:
        def number(part: Tensor | float) -> float:
            return numbers[places[id(part)]] if isinstance(part, Tensor) else part

        return {name: Statistic(one.reduction, tuple(map(number, one.parts)), one.about) for name, one in kept.items()}

    if not parts:
        return Reading(torch.zeros(0, dtype=torch.float64), says)
    return Reading(torch.stack(parts), says)
