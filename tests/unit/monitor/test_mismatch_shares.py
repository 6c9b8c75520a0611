"""Shares of backend, staleness and drift: hand-worked numbers, and identities that hold for any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.monitor.mismatch_shares import (
    LEAST_TOKENS,
    RECENT,
    RecentFloor,
    build_share_statistics,
    compute_shares,
    compute_sums_by_row,
)

MU = math.log(0.3)  # all in the bin 0.1-0.5


def k3(value: float) -> float:
    return math.expm1(value) - value


def sums_of(
    gap: list[list[float]], drift: list[list[float]], staleness: list[Any] | None, mu: float = MU
) -> np.ndarray:
    """Sums of rows with these log pi_old/mu and log pi/pi_old, all valid."""
    g, d = torch.tensor(gap, dtype=torch.float64), torch.tensor(drift, dtype=torch.float64)
    base = torch.full_like(g, mu)
    age = None if staleness is None else torch.tensor(staleness)
    return compute_sums_by_row(base, base + g, base + g + d, torch.ones_like(g), age).numpy()


def test_fresh_rows_worked_by_hand() -> None:
    """G = 0.1, -0.1 and D = 0.2, 0: L = 0.3, -0.1 with mean 0.1 and variance (0.04 + 0.04) / 2 = 0.04.

    Cov(G, L) = (0.1 x 0.2 + -0.1 x -0.2) / 2 = 0.02, which is half; the share of D is the other half.
    """
    of_variance, of_kl = compute_shares(sums_of([[0.1, -0.1]], [[0.2, 0.0]], [0]).sum(0))
    assert of_variance.whole == pytest.approx(0.04)
    assert of_variance.backend == pytest.approx(0.5)
    assert of_variance.staleness == pytest.approx(0.0, abs=1e-12)
    assert of_variance.drift == pytest.approx(0.5)
    # KL: k3(L) = k3(0.3) + k3(-0.1) in all, of which k3(0.1) + k3(-0.1) before the drift.
    assert of_kl.whole == pytest.approx((k3(0.3) + k3(-0.1)) / 2)
    assert of_kl.backend == pytest.approx((k3(0.1) + k3(-0.1)) / (k3(0.3) + k3(-0.1)))
    assert of_kl.rollout == of_kl.backend


def test_stale_rows_borrow_the_backend_of_fresh_ones() -> None:
    """20 fresh tokens with G = +-0.1, and 20 stale tokens with G = +-0.3, without drift.

    Var(L) = (20 x 0.01 + 20 x 0.09) / 40 = 0.05. Backend: 0.01 for each token, fresh or stale, so 0.01 / 0.05 = 0.2.
    """
    half = LEAST_TOKENS // 2
    table = sums_of([[0.1, -0.1] * half, [0.3, -0.3] * half], [[0.0] * 2 * half] * 2, [0, 2]).sum(0)
    of_variance, of_kl = compute_shares(table)
    assert of_variance.whole == pytest.approx(0.05)
    assert of_variance.backend == pytest.approx(0.2)
    assert of_variance.staleness == pytest.approx(0.8)
    assert of_variance.drift == pytest.approx(0.0, abs=1e-12)
    backend, stale = k3(0.1) + k3(-0.1), k3(0.3) + k3(-0.3)
    assert of_kl.backend == pytest.approx(2 * backend / (backend + stale))
    assert of_kl.staleness == pytest.approx((stale - backend) / (backend + stale))


@pytest.mark.parametrize(
    ("staleness", "why"), [([1, 1], "no fresh row"), (None, "versions not told"), ([0, -1], "one row of unknown age")]
)
def test_without_fresh_rows_backend_and_staleness_are_not_identified(staleness: list[int] | None, why: str) -> None:
    rows = [[0.1, -0.2] * LEAST_TOKENS] * 2
    of_variance, of_kl = compute_shares(sums_of(rows, [[0.05] * len(rows[0])] * 2, staleness).sum(0))
    for split in (of_variance, of_kl):
        assert split.backend is None, why
        assert split.staleness is None
        assert split.rollout + split.drift == pytest.approx(1.0)


def test_too_few_fresh_tokens_at_the_probability_of_stale_ones() -> None:
    """Fresh tokens have probability 0.3 and stale tokens 0.0001, so the backend noise there is unknown."""
    fresh = sums_of([[0.1, -0.1] * LEAST_TOKENS], [[0.0] * 2 * LEAST_TOKENS], [0])
    stale = sums_of([[0.1, -0.1] * LEAST_TOKENS], [[0.0] * 2 * LEAST_TOKENS], [1], mu=math.log(1e-4))
    assert compute_shares((fresh + stale).sum(0))[0].backend is None
    # One stale token in 41 there is borne: it is taken to be like the nearest bin.
    few = sums_of([[0.1]], [[0.0]], [1], mu=math.log(1e-4))
    many = sums_of([[0.1, -0.1] * LEAST_TOKENS], [[0.0] * 2 * LEAST_TOKENS], [1])
    assert compute_shares((fresh + few + many).sum(0))[0].backend is not None


def test_an_update_without_fresh_rows_takes_the_floor_of_those_before() -> None:
    """Fresh G = +-0.1, and later only stale G = +-0.3: the backend's share is 0.01 / 0.09."""
    half = LEAST_TOKENS // 2
    fresh, stale = (
        build_share_statistics(sums_of([[g, -g] * half], [[0.0] * 2 * half], [age]).ravel().tolist())
        for g, age in ((0.1, 0), (0.3, 1))
    )
    floor = RecentFloor()
    assert math.isnan(floor.compute_shares(stale)["attribution/variance_share/backend"])
    floor.add(fresh)
    values = floor.compute_shares(stale)
    assert values["attribution/variance_share/backend"] == pytest.approx(1 / 9)
    assert values["attribution/variance_share/staleness"] == pytest.approx(8 / 9)
    assert set(values) == set(stale)
    # What came too long ago is forgotten.
    for _ in range(RECENT):
        floor.add(stale)
    assert math.isnan(floor.compute_shares(stale)["attribution/variance_share/backend"])
    assert floor.compute_shares(fresh) == pytest.approx({name: one.value() for name, one in fresh.items()})
    assert floor.compute_shares({}) == {}
