"""The second statement agrees with the first on every group, and with no other."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.extensions.pass_at_k import advantages
from recipe.offpolicy.extensions.pass_at_k.budget import PassRates
from recipe.offpolicy.extensions.pass_at_k.estimators import OBJECTIVES, find_impossible
from recipe.offpolicy.extensions.pass_at_k.evidence import find_difference, find_wrong_chance, state_none_right
from recipe.offpolicy.extensions.pass_at_k.upsampling import compute_chances


def test_none_of_k_drawn() -> None:
    for n in range(1, 12):
        for c in range(n + 1):
            for k in range(n + 1):
                assert state_none_right(n, c, k) == pytest.approx(math.comb(n - c, k) / math.comb(n, k), abs=1e-15)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_both_agree_on_every_group(objective: str) -> None:
    for n in (2, 6, 8, 12):
        for c in range(n + 1):
            right = (torch.arange(n) < c).tolist()
            for k in range(1, n + 1):
                if find_impossible(n, k, objective) is None:
                    found = advantages(right, k, objective=objective, seed=c)
                    assert find_difference(found.float().tolist(), right, k, objective) is None


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_another_value_is_named(objective: str) -> None:
    right = [True, *[False] * 7]
    found = advantages(right, 4, objective=objective).tolist()
    found[5] += 1e-3
    assert "rollout 5 of 8" in (find_difference(found, right, 4, objective) or "")


def test_a_right_row_below_the_mean_is_no_deal() -> None:
    right = [True, *[False] * 7]
    assert find_difference([-0.5, *[0.5] * 4, *[-0.5] * 3], right, 4, "groups") is not None


def test_chances_of_draws_agree_with_the_formula_and_no_others() -> None:
    """Beta(1, 3): p = 1/4, or (1 + 2) / (4 + 4) after 2 of 4; n = 2: 2 p (1 - p) is 3/8 and 15/32."""
    for k in (1, 3):
        first, second = (5 / 8) ** (k - 1) * 15 / 32, (3 / 4) ** (k - 1) * 3 / 8
        chances = [0.1 + 0.8 * each / (first + second) for each in (first, second)]
        assert find_wrong_chance(chances, {"0": (4.0, 2.0)}, (1.0, 3.0), 2, 0.2, k) is None
        assert "prompt 0 of 2" in (find_wrong_chance(chances, {"1": (4.0, 2.0)}, (1.0, 3.0), 2, 0.2, k) or "")
    # 1 - p is 1/102 and 2/102 of solved prompts: their powers are too small next to that of a prompt never answered.
    solved = PassRates(1.0, {"0": (100.0, 100.0), "1": (100.0, 99.0)})
    assert (
        find_wrong_chance(compute_chances(solved, 2, 4, 0.2, 512).tolist(), solved.counts, (1, 1), 4, 0.2, 512) is None
    )
    rates = PassRates(0.9, {str(prompt): (float(prompt), prompt / 3) for prompt in range(40)}, (0.4, 1.2))
    found = compute_chances(rates, 50, 16, 0.2).tolist()
    assert find_wrong_chance(found, rates.counts, rates.prior, 16, 0.2) is None
    found[49] *= 1 + 1e-5
    assert "prompt 49 of 50" in (find_wrong_chance(found, rates.counts, rates.prior, 16, 0.2) or "")
