"""Estimators of pass@k against enumeration in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
import torch

from recipe.offpolicy.extensions.pass_at_k.estimates import unbiased, unbiased_dynamic
from recipe.offpolicy.extensions.pass_at_k.training import (
    ERROR,
    OBJECTIVES,
    PassRates,
    advantages,
    compute_chances,
    find_impossible,
    state_advantages,
    state_chances,
)

SCHEDULES = [([8, 16, 32, 64], 1), (list(range(1, 65)), 2), ([4, 8, 16, 24], 3)]


def stops(looks: list[int], successes: int) -> dict[tuple[int, int], int]:
    """Orders of samples that end at each (n, c), one sample at a time."""
    at, found = {0: 1}, {}
    for n in range(1, looks[-1] + 1):
        at = {c: at.get(c, 0) + at.get(c - 1, 0) for c in range(n + 1) if at.get(c, 0) + at.get(c - 1, 0)}
        if n in looks:
            ending = {c for c in at if c >= successes or n == looks[-1]}
            found |= {(n, c): at.pop(c) for c in ending}
    return found


@pytest.mark.parametrize("n", [1, 2, 7, 33, 64])
def test_unbiased_is_the_share_of_subsets_with_a_right_one(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            wanted = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
            assert unbiased(n, c, k) == pytest.approx(float(wanted), abs=1e-12)
    if n == 7:
        subsets = list(combinations([1, 1, 0, 0, 0, 0, 0], 3))
        assert unbiased(7, 2, 3) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 2), (4, 2, 5), (4, -1, 2), (4, 2, 0), (4.0, 2, 1), (4, 2, True)])
def test_impossible_counts_are_named(n: Any, c: Any, k: Any) -> None:
    with pytest.raises(ValueError, match=r"k=True|=\d|pass@\d"):
        unbiased(n, c, k)


@pytest.mark.parametrize(("looks", "successes"), SCHEDULES)
@pytest.mark.parametrize("p", [0.01, 0.2, 0.9])
def test_under_stopping_the_mean_estimate_is_pass_at_k(looks: list[int], successes: int, p: float) -> None:
    paths = stops(looks, successes)
    chances = {(n, c): orders * p**c * (1 - p) ** (n - c) for (n, c), orders in paths.items()}
    assert sum(chances.values()) == pytest.approx(1, abs=1e-12)
    for k in (1, 2, 4, 8, 16, 24):
        mean = sum(chance * unbiased_dynamic(looks, n, c, k, successes=successes) for (n, c), chance in chances.items())
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_k_may_exceed_the_samples_that_were_taken() -> None:
    assert unbiased_dynamic([8, 16], 8, 1, 16, successes=1) == 1.0
    with pytest.raises(ValueError, match="at most n"):
        unbiased(8, 1, 16)


@pytest.mark.parametrize(
    ("looks", "n", "c", "k", "successes", "said"),
    [
        ([8, 16], 8, 1, 17, 1, "pass@17 with a last look at 16"),
        ([8, 16], 12, 1, 4, 1, "12 samples: sampling ends at one of"),
        ([8, 16], 8, 0, 4, 1, "sampling continues until 1"),
        ([8, 16], 16, 9, 4, 1, "would have ended at an earlier look"),
        ([16, 8], 8, 1, 4, 1, "expected increasing"),
        ([8, 16], 8, 1, 4, 0, "successes=0"),
    ],
)
def test_points_that_sampling_cannot_end_at_are_named(
    looks: list[int], n: int, c: int, k: int, successes: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        unbiased_dynamic(looks, n, c, k, successes=successes)


# The second statement agrees with the first on every group, and with no other


def agree(seen: list[float], stated: list[float]) -> bool:
    return seen == pytest.approx(stated, rel=ERROR, abs=ERROR)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_both_agree_on_every_group(objective: str) -> None:
    for n in (2, 6, 8, 12):
        for c in range(n + 1):
            right = (torch.arange(n) < c).tolist()
            for k in range(1, n + 1):
                if find_impossible(n, k, objective) is None:
                    found = advantages(right, k, objective=objective, seed=c)
                    seen = found.float().tolist()
                    assert agree(seen, state_advantages(seen, right, k, objective))


def test_a_right_row_below_the_mean_is_no_deal() -> None:
    right = [True, *[False] * 7]
    found = [-0.5, *[0.5] * 4, *[-0.5] * 3]
    assert not agree(found, state_advantages(found, right, 4, "groups"))


def test_chances_of_draws_agree_with_the_formula_and_no_others() -> None:
    """Beta(1, 3): p = 1/4, or (1 + 2) / (4 + 4) after 2 of 4; n = 2: 2 p (1 - p) is 3/8 and 15/32."""
    for k in (1, 3):
        first, second = (5 / 8) ** (k - 1) * 15 / 32, (3 / 4) ** (k - 1) * 3 / 8
        chances = [0.1 + 0.8 * each / (first + second) for each in (first, second)]
        assert state_chances(2, {"0": (4.0, 2.0)}, (1.0, 3.0), 2, 0.2, k) == pytest.approx(chances)
    # 1 - p is 1/102 and 2/102 of solved prompts: their powers are too small next to that of a prompt never answered.
    solved = PassRates(1.0, {"0": (100.0, 100.0), "1": (100.0, 99.0)})
    first = compute_chances(solved, 2, 4, 0.2, 512).tolist()
    assert state_chances(2, solved.counts, (1, 1), 4, 0.2, 512) == pytest.approx(first, rel=ERROR)
    rates = PassRates(0.9, {str(prompt): (float(prompt), prompt / 3) for prompt in range(40)}, (0.4, 1.2))
    first = compute_chances(rates, 50, 16, 0.2).tolist()
    assert state_chances(50, rates.counts, rates.prior, 16, 0.2, 4) == pytest.approx(first, rel=ERROR)
