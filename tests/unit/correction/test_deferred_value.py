"""Numbers leave the device together, each to whom it concerns."""

from __future__ import annotations

import torch

from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.correction.deferred_value import DeferredValue, defer_statistics, fetch


def test_readings_are_fetched_together() -> None:
    floats = DeferredValue(torch.tensor([0.1, -0.0], dtype=torch.float64), list)
    # Beyond 2**53, which a float64 would round.
    integers = DeferredValue(torch.tensor([2**53 + 1]), sum)
    assert fetch([floats, integers]) == [[0.1, -0.0], 2**53 + 1]
    assert fetch([]) == []


def test_a_part_that_two_statistics_share_travels_once() -> None:
    count = torch.tensor(4.0, dtype=torch.float64)
    one = Statistic(Reduction.MEAN, (torch.tensor(6.0, dtype=torch.float64), count))
    other = Statistic(Reduction.MEAN, (3.0, count))
    reading = defer_statistics({"one": one, "other": other})
    assert len(reading.numbers) == 2
    (found,) = fetch([reading])
    assert {name: statistic.parts for name, statistic in found.items()} == {"one": (6.0, 4.0), "other": (3.0, 4.0)}
    assert found["one"].value() == 1.5


def test_statistics_in_floats_need_no_transfer() -> None:
    reading = defer_statistics({"one": Statistic(Reduction.SUM, (2.0,))})
    assert len(reading.numbers) == 0
    assert fetch([reading])[0]["one"].value() == 2.0
