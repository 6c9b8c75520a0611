"""Estimates of pass@k: one prompt in exact arithmetic, means over prompts, and the fit."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch

from recipe.offpolicy.extensions.pass_at_k.estimates import (
    NotIdentified,
    extrapolate,
    fit,
    summarize,
    unbiased,
    unbiased_dynamic,
)
from recipe.offpolicy.extensions.pass_at_k.training import (
    PassRates,
    advantages,
    compute_chances,
    find_impossible,
)

SCHEDULES = [([8, 16, 32, 64], 1), (list(range(1, 65)), 2), ([4, 8, 16, 24], 3)]


def stops(looks: list[int], successes: int) -> dict[tuple[int, int], int]:
    """Count the orders of samples that end at each (n, c), one sample at a time."""
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


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 2), (4, -1, 2), (4, 2, 0), (4, 2, 5)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
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


@pytest.mark.parametrize(
    ("looks", "n", "c", "k", "successes", "said"),
    [
        ([8, 16], 8, 1, 17, 1, "pass@17 with a last look at 16"),
        ([8, 16], 12, 1, 4, 1, "12 samples: sampling ends at one of"),
        ([8, 16], 8, 0, 4, 1, "sampling continues until 1"),
        ([8, 16], 16, 9, 4, 1, "would have ended at an earlier look"),
    ],
)
def test_impossible_ends_are_named(looks: list[int], n: int, c: int, k: int, successes: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unbiased_dynamic(looks, n, c, k, successes=successes)


# Advantages and draws against a second implementation


def none_right(n: int, c: int, k: int) -> float:
    """The probability that k of n rows, drawn without replacement, are all wrong if c rows are correct."""
    return math.prod((n - c - drawn) / (n - drawn) for drawn in range(k)) if n - c >= k else 0.0


def state(n: int, c: int, k: int, objective: str) -> tuple[float, float]:
    """The advantages of a correct and of a wrong row."""
    others = n - 1
    if objective == "loo":
        of_right = k * none_right(others, c - 1, k) if c else 0.0
        return of_right, k * (none_right(others, c, k) - none_right(others, c, k - 1)) if c < n else 0.0
    if objective == "loo_minus_one":
        return (k * none_right(others, c - 1, k - 1) if c else 0.0), 0.0
    missed = none_right(n, c, k)
    spread = math.sqrt(missed * (1 - missed))
    return (missed / spread, (missed - none_right(others, c, k - 1)) / spread) if spread > 0 else (0.0, 0.0)


@pytest.mark.parametrize("objective", ["loo", "loo_minus_one", "analytic"])
def test_each_group_has_the_advantages_of_its_subsets(objective: str) -> None:
    for n in (2, 6, 8, 12):
        for c in range(n + 1):
            right = (torch.arange(n) < c).tolist()
            for k in range(1, n + 1):
                if find_impossible(n, k, objective) is None:
                    of_right, of_wrong = state(n, c, k, objective)
                    found = advantages(right, k, objective=objective).tolist()
                    assert found == pytest.approx([of_right] * c + [of_wrong] * (n - c), abs=1e-9)


def state_chances(
    prompts: int, counts: dict[str, tuple[float, float]], prior: tuple[float, float], n: int, share: float, k: int
) -> list[float]:
    a, b = prior
    found = [counts.get(str(prompt), (0.0, 0.0)) for prompt in range(prompts)]
    hardest = max((b + answers - right) / (a + b + answers) for answers, right in found)

    def state_worth(answers: float, right: float) -> float:
        p, q = (a + right) / (a + b + answers), (b + answers - right) / (a + b + answers)
        return (q / hardest) ** (k - 1) * sum(math.comb(n, wins) * p**wins * q ** (n - wins) for wins in range(1, n))

    worths = [state_worth(*pair) for pair in found]
    return [share / prompts + (1 - share) * worth / sum(worths) for worth in worths]


def test_chances_of_draws_agree_with_the_formula_and_no_others() -> None:
    """Beta(1, 3): p = 1/4, or (1 + 2) / (4 + 4) after 2 of 4; for n = 2, 2 p (1 - p) is 3/8 and 15/32."""
    for k in (1, 3):
        first, second = (5 / 8) ** (k - 1) * 15 / 32, (3 / 4) ** (k - 1) * 3 / 8
        chances = [0.1 + 0.8 * each / (first + second) for each in (first, second)]
        assert state_chances(2, {"0": (4.0, 2.0)}, (1.0, 3.0), 2, 0.2, k) == pytest.approx(chances)
    # 1 - p is 1/102 and 2/102 of solved prompts: their powers are too small next to that of a prompt never answered.
    solved = PassRates(1.0, {"0": (100.0, 100.0), "1": (100.0, 99.0)})
    first = compute_chances(solved, 2, 4, 0.2, 512).tolist()
    assert state_chances(2, solved.counts, (1, 1), 4, 0.2, 512) == pytest.approx(first, rel=1e-6)
    rates = PassRates(0.9, {str(prompt): (float(prompt), prompt / 3) for prompt in range(40)}, (0.4, 1.2))
    first = compute_chances(rates, 50, 16, 0.2).tolist()
    assert state_chances(50, rates.counts, rates.prior, 16, 0.2, 4) == pytest.approx(first, rel=1e-6)


# Means over prompts, their intervals, and what is left out


def test_means_over_prompts_of_several_sizes() -> None:
    found = summarize([8, 8, 16], [1, 8, 0], [1, 4, 16], draws=200)
    value, low, high = found.points[4]
    assert value == pytest.approx((0.5 + 1 + 0) / 3)
    assert low < value < high
    assert found.left_out == (16,)
    assert (found.prompts, found.samples, found.unsolved) == (3, 32, 1 / 3)
    assert found.fit is None


def test_the_fit_or_why_there_is_none() -> None:
    found = summarize([8] * 40, [0, 1, 2, 6] * 10, [1], extrapolate=[64], draws=50)
    assert found.fit is not None
    assert found.points[1][0] < found.fit.points[64][0] < 1
    none = summarize([8] * 40, [8] * 40, [1], extrapolate=[64], draws=50)
    assert (none.fit, none.not_identified) == (None, "all samples are right.")


# The fit over prompts: what it recovers, and where it says that nothing is identified


@pytest.mark.parametrize(("n", "c"), [([4, 4, 6, 8, 8], [0, 1, 6, 2, 7]), ([8, 8], [1, 7])])
def test_the_gradient_is_zero_at_the_fit(n: list[int], c: list[int]) -> None:
    """The likelihood, computed only with lgamma, is evaluated one part in a thousand to either side; two prompts are
    enough.
    """
    a, b = fit(n, c)

    def value(x: float, y: float) -> float:
        def log_beta(p: float, q: float) -> float:
            return math.lgamma(p) + math.lgamma(q) - math.lgamma(p + q)

        return sum(log_beta(x + right, y + of - right) - log_beta(x, y) for of, right in zip(n, c, strict=True))

    best = value(a, b)
    for x, y in ((1.001, 1), (0.999, 1), (1, 1.001), (1, 0.999)):
        assert value(a * x, b * y) < best


@pytest.mark.parametrize(
    ("n", "c", "said"),
    [
        ([8], [4], "1 prompt"),
        ([8, 8, 8], [8, 8, 8], "all samples are right"),
        ([1, 1, 1], [1, 0, 1], "one sample per prompt"),
        ([8, 4, 8], [8, 0, 0], "all correct or all wrong"),
        ([8, 8, 8, 8], [4, 4, 4, 4], "vary between prompts no more"),
        ([64] * 40, [31, 32, 33, 32] * 10, "vary between prompts no more"),
    ],
)
def test_what_is_not_identified_is_said(n: list[int], c: list[int], said: str) -> None:
    with pytest.raises(NotIdentified, match=said):
        fit(torch.tensor(n), torch.tensor(c))


def test_pass_at_k_of_beta_rates_by_hand() -> None:
    """Beta(2, 3): k = 1 is the mean 2/5, and k = 2 is 1 - (3 x 4) / (5 x 6)."""
    assert [extrapolate(2.0, 3.0, k) for k in (1, 2)] == pytest.approx([0.4, 0.6])
