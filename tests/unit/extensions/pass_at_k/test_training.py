"""Advantages that train pass@k: gradients by enumeration, hand-worked numbers, and verl's estimators next to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.extensions.pass_at_k import advantages
from recipe.offpolicy.extensions.pass_at_k.evidence import find_difference
from recipe.offpolicy.extensions.pass_at_k.training import OBJECTIVES, find_impossible


def group(n: int, c: int) -> Tensor:
    return torch.arange(n) < c


def mean_gradient(n: int, k: int, p: float, objective: str) -> float:
    """The mean of sum_i A_i d log p(x_i) / d theta / N over all outcomes; right: 1 - p, wrong: -p."""
    total = 0.0
    for c in range(n + 1):
        a = advantages(group(n, c), k, objective=objective)
        slope = group(n, c).double() - p
        total += math.comb(n, c) * p**c * (1 - p) ** (n - c) * float((a * slope).mean())
    return total


@pytest.mark.parametrize("objective", ["loo", "loo_minus_one"])
@pytest.mark.parametrize(("n", "k"), [(8, 1), (8, 2), (8, 4), (8, 7), (16, 8)])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.4, 0.9])
def test_the_gradient_is_that_of_pass_at_k(n: int, k: int, p: float, objective: str) -> None:
    wanted = k * (1 - p) ** (k - 1) * p * (1 - p)
    assert mean_gradient(n, k, p, objective) == pytest.approx(wanted, abs=1e-12)


def test_analytic_is_another_objective() -> None:
    """Its scale weighs prompts by 1 / sqrt(R (1 - R))."""
    wanted = 4 * 0.9**3 * 0.1 * 0.9
    assert mean_gradient(8, 4, 0.1, "analytic") != pytest.approx(wanted, rel=0.05)


def verl_estimate(name: str, right: Tensor) -> Tensor:
    from verl.trainer.ppo import core_algos

    rewards = right.double()[:, None]
    index = np.array(["a"] * len(right), dtype=object)
    config = {"norm_adv_by_std_in_grpo": False}
    found, _ = getattr(core_algos, f"compute_{name}_outcome_advantage")(
        rewards, torch.ones_like(rewards), index, config=config
    )
    return found[:, 0]


@pytest.mark.parametrize("c", range(9))
def test_loo_at_1_is_verls_rloo(c: int) -> None:
    torch.testing.assert_close(
        advantages(group(8, c), 1, objective="loo"), verl_estimate("rloo", group(8, c)), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("c", range(9))
def test_loo_minus_one_at_n_is_n_times_verls_grpo_passk(c: int) -> None:
    torch.testing.assert_close(
        advantages(group(8, c), 8, objective="loo_minus_one"), 8 * verl_estimate("grpo_passk", group(8, c))
    )


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


@given(st.integers(2, 24), st.data())
def test_sums_signs_and_order(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    found = advantages(group(n, c), k, objective="analytic")
    assert abs(float(found.sum())) < 1e-12 * n
    assert bool((found[:c] >= 0).all())
    assert bool((found[c:] <= 0).all())
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    assert torch.equal(advantages(group(n, c)[order], k, objective="analytic"), found[order])
    if n - c < k or c == 0:
        assert not bool(found.any())


def test_analytic_at_the_groups_size_is_zero() -> None:
    for c in range(9):
        assert not bool(advantages(group(8, c), 8, objective="analytic").any())


@pytest.mark.slow
def test_deals_average_to_analytic_before_scaling() -> None:
    n, k, c, deals = 8, 4, 2, 20_000
    best = 1 - math.comb(n - c, k) / math.comb(n, k)
    before = advantages(group(n, c), k, objective="analytic") * math.sqrt(best * (1 - best))
    drawn = torch.stack([advantages(group(n, c), k, objective="groups", seed=seed) for seed in range(deals)])
    errors = drawn.std(0) / math.sqrt(deals)
    assert bool(((drawn.mean(0) - before).abs() < 3 * errors).all())


def test_a_deal_depends_on_its_seed_alone_and_gives_each_row_its_groups_best() -> None:
    found = advantages(group(8, 1), 4, objective="groups", seed=5)
    assert torch.equal(found, advantages(group(8, 1), 4, objective="groups", seed=5))
    assert sorted(found.tolist()) == 4 * [-0.5] + 4 * [0.5]
    assert float(found[0]) == 0.5
    assert len({tuple(advantages(group(8, 1), 4, objective="groups", seed=s).tolist()) for s in range(20)}) > 5


@pytest.mark.parametrize(
    ("n", "k", "objective"),
    [
        *((8, k, objective) for objective in OBJECTIVES for k in (0, 9, -1)),
        (8, 8, "loo"),
        (1, 1, "loo"),
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
        ([0.5, 1], 1, "loo", "right or wrong"),
        ([[1, 0]], 1, "loo", "one per row"),
        ([], 1, "loo", "one per row"),
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
    assert find_difference(found.tolist(), [True] * 90 + [False] * 38, 32, "analytic") is None
