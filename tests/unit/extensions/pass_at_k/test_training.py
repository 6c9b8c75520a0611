"""Advantages that train pass@k: gradients by enumeration, hand-worked numbers, and verl's estimators next to them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.extensions.pass_at_k.training import (
    ERROR,
    OBJECTIVES,
    advantages,
    find_impossible,
    state_advantages,
)


def group(n: int, c: int) -> Tensor:
    return torch.arange(n) < c


def test_hand_worked_groups() -> None:
    """N = 8, c = 1, k = 4: rho(8, 1, 4) = 1/2; C(6, 3) / C(7, 3) = 4/7.

    analytic: right (1 - 1/2) / (1/2) = 1, wrong (1/2 - 4/7) / (1/2) = -1/7.
    loo: right 4 (1 - 0) = 4, wrong 4 (rho(7, 1, 3) - rho(7, 1, 4)) = 4 (3/7 - 4/7) = -4/7.
    loo_minus_one: right 4 C(7, 3) / C(7, 3) = 4.
    """
    wanted = {"analytic": (1.0, -1 / 7), "loo": (4.0, -4 / 7), "loo_minus_one": (4.0, 0.0)}
    for objective, (of_right, of_wrong) in wanted.items():
        found = advantages(group(8, 1), 4, objective=objective).tolist()
        assert found == pytest.approx([of_right] + 7 * [of_wrong])


def test_a_deal_depends_on_its_seed_alone_and_gives_each_row_its_groups_best() -> None:
    found = advantages(group(8, 1), 4, objective="groups", seed=5)
    assert torch.equal(found, advantages(group(8, 1), 4, objective="groups", seed=5))
    assert sorted(found.tolist()) == 4 * [-0.5] + 4 * [0.5]
    assert float(found[0]) == 0.5
    assert len({tuple(advantages(group(8, 1), 4, objective="groups", seed=s).tolist()) for s in range(20)}) > 5


@pytest.mark.parametrize(
    ("n", "k", "objective"),
    [
        *((8, k, objective) for objective in OBJECTIVES for k in (0, 9)),
        (8, 8, "loo"),
        (8, 3, "groups"),
    ],
)
def test_an_impossible_k_is_named_with_the_group(n: int, k: int, objective: str) -> None:
    assert find_impossible(n, k, objective) is not None
    with pytest.raises(ValueError, match=rf"k={k} of a group of {n}"):
        advantages(group(n, 1), k, objective=objective)


@pytest.mark.parametrize(
    ("right", "k", "objective", "said"),
    [
        ([0.5, 1], 1, "loo", r"1 \(correct\) or 0 \(wrong\)"),
        ([[1, 0]], 1, "loo", "one per row"),
        ([1, 0], 1.0, "loo", "k=1.0"),
        ([1, 0], 1, "best", "objective=best"),
    ],
)
def test_bad_input_is_an_error(right: list[float], k: int, objective: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        advantages(right, k, objective=objective)  # type: ignore[arg-type]


def test_analytic_where_almost_no_subset_fails() -> None:
    """Of the subsets of 32 of 128 rows, 90 right, C(38, 32) of 1.5e30 fail: R rounds to 1, and s to 0."""
    found = advantages([1] * 90 + [0] * 38, 32, objective="analytic")
    of_right = math.sqrt(math.comb(38, 32) / (math.comb(128, 32) - math.comb(38, 32)))
    assert found[0].item() == pytest.approx(of_right, abs=0) == pytest.approx(1.3668e-12, rel=1e-4, abs=0)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-20)
    stated = state_advantages(found.tolist(), [True] * 90 + [False] * 38, 32, "analytic")
    assert found.tolist() == pytest.approx(stated, abs=ERROR)
