"""The next bounds of a mask: by hand, and for any data they stay in order, in range and close to the last ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.correction import MaskSpec
from recipe.offpolicy.correction.read_parts import read_mask
from recipe.offpolicy.monitor.moving_bounds import (
    EDGES,
    Evidence,
    Histogram,
    Schedule,
    compute_distances,
    compute_quantile,
    find_keeping_distance,
)
from tests.support.corrections import band, opsm, spec
from tests.support.drawn import examples
from tests.support.histograms import histogram

SCHEDULE = Schedule(find_keeping_distance, 0.9, "both", rate=0.5, floor=0.1, ceiling=10.0, noise_kept=0.9)


def mask_of(values: dict[str, Any]) -> MaskSpec:
    return spec(m=values).masks[0][1]


def counts(*distances: float) -> Histogram:
    values = torch.tensor(distances, dtype=torch.float64)
    parts = histogram(values, torch.ones(len(distances), dtype=torch.bool)).parts
    return Histogram(EDGES, [float(n) for n in parts], units=len(distances))


def moved(mask: MaskSpec, bounds: dict[str, float | None]) -> MaskSpec:
    return read_mask(mask.to_mapping() | bounds, key="correction.masks.m")


def after(
    values: dict[str, Any], distances: list[float], noise: list[float] | None = None, times: int = 1, **changes: Any
) -> dict[str, float]:
    """Distances of the bounds after ``times`` changes on the same evidence."""
    schedule = replace(SCHEDULE, **changes)
    configured = current = mask_of(values)
    evidence = (counts(*distances), None if noise is None else counts(*noise))
    for _ in range(times):
        current = moved(current, Evidence(schedule, configured, current, *evidence).compute_next_bounds())
    return compute_distances(current)


SYMMETRIC = band(math.exp(-0.1), math.exp(0.1))


def hindered(values: dict[str, Any], distances: list[float], noise: list[float] | None = None, **changes: Any) -> str:
    """Kinds of obstacles to bounds with their configured values."""
    mask, schedule = mask_of(values), replace(SCHEDULE, **changes)
    evidence = (counts(*distances), None if noise is None else counts(*noise))
    return " ".join(sorted(Evidence(schedule, mask, mask, *evidence).find_obstacles()))


@pytest.mark.parametrize("noise", [3.0, math.inf])
def test_noise_lifts_no_bound_past_the_ceiling(noise: float) -> None:
    # Ten times 0.1 is the ceiling, six steps of 1.5 away.
    assert after(opsm(0.1), [0.05] * 10, [noise] * 10)["lower"] == pytest.approx(0.15)
    assert after(opsm(0.1), [0.05] * 10, [noise] * 10, times=9)["lower"] == pytest.approx(1.0)
    assert hindered(opsm(0.1), [0.05] * 10, [noise] * 10) == "ceiling"


def test_noise_that_decides_in_place_of_the_target_is_an_obstacle() -> None:
    assert hindered(opsm(0.1), [0.01] * 10, [0.01] * 10) == ""
    # Beyond the bound in force, and beyond the one that the target would go to: 0.0667.
    assert hindered(opsm(0.1), [0.3] * 10, [0.2] * 10) == "noise"
    assert hindered(opsm(0.1), [0.01] * 10, [0.08] * 10) == "noise"
    assert hindered(opsm(0.1), [0.01] * 10, []) == ""
    assert hindered(SYMMETRIC, [0.01] * 10) == ""


MASKS = draw.sampled_from(
    [
        band(0.99, 1.01),
        band(0.5, 5.0),
        band(None, 2.0),
        opsm(0.1),
        band(None, 0.01, aggregate="k3_mean"),
        band(-0.2, 0.2, aggregate="binary_tv"),
        band(1e-4, 100.0, aggregate="any"),
    ]
)
LOG_DISTANCES = draw.lists(draw.floats(-8.0, 4.0) | draw.just(math.inf), min_size=0, max_size=40)


@examples
@given(MASKS, draw.lists(draw.tuples(LOG_DISTANCES, LOG_DISTANCES), min_size=1, max_size=12), draw.floats(0.05, 1.0))
def test_bounds_stay_in_order_in_range_and_near_the_last_ones(
    values: dict[str, Any], updates: list[tuple[list[float], list[float]]], rate: float
) -> None:
    schedule = replace(SCHEDULE, rate=rate)
    configured = current = mask_of(values)
    start = compute_distances(configured)
    for update, fresh in updates:
        noise = counts(*(10**d for d in fresh)) if configured.ratio == "full" else None
        bounds = Evidence(schedule, configured, current, counts(*(10**d for d in update)), noise).compute_next_bounds()
        following = moved(current, bounds)
        before, now = compute_distances(current), compute_distances(following)
        for side, distance in now.items():
            if math.isinf(start[side]):
                assert math.isinf(distance)
                continue
            # The neutral value, distance 0, stays inside, and so no bound crosses the other.
            assert distance > 0
            if distance == before[side]:
                continue
            assert before[side] / (1 + rate) <= distance * (1 + 1e-9)
            assert distance <= before[side] * (1 + rate) * (1 + 1e-9)
            assert start[side] * schedule.floor <= distance * (1 + 1e-9)
            assert distance <= start[side] * schedule.ceiling * (1 + 1e-9)
            if noise is not None and distance < before[side]:
                assert distance >= compute_quantile(noise, 0.9) * (1 - 1e-9)
        current = following


def test_a_share_that_no_bound_keeps_leaves_it_where_it_is() -> None:
    """This is the case with side=upper if the lower bound alone rejects two of ten, and one of ten should be
    dropped.
    """
    rows = [0.3] * 8 + [math.inf] * 2
    assert after(SYMMETRIC, rows, times=20, side="upper")["upper"] == pytest.approx(0.1)
    assert hindered(SYMMETRIC, rows, side="upper") == "share"
    # One of ten may be lost to it: then the bound has to keep all the others.
    rows = [0.3] * 9 + [math.inf]
    assert after(SYMMETRIC, rows, times=20, side="upper")["upper"] == pytest.approx(compute_quantile(counts(0.3), 0.9))
    assert hindered(SYMMETRIC, rows, side="upper") == ""
