"""Group sizes against brute force, and the rates that they go by."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.offpolicy.extensions.pass_at_k.training import PassRates, allocate


def worth(rates: list[float], sizes: tuple[int, ...] | list[int], k: int) -> float:
    return sum(k * (1 - p) ** (k - 1) * (1 - p**n - (1 - p) ** n) for p, n in zip(rates, sizes, strict=True))


@given(st.lists(st.floats(0.001, 0.999), min_size=6, max_size=6), st.integers(6, 24), st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=15)
def test_optimal_against_all_deals(rates: list[float], total: int, k: int) -> None:
    found = allocate(rates, total, least=1, most=4, k=k)
    assert sum(found) == total
    assert all(1 <= size <= 4 for size in found)
    best = max(worth(rates, sizes, k) for sizes in product(range(1, 5), repeat=6) if sum(sizes) == total)
    assert worth(rates, found, k) == pytest.approx(best, abs=1e-12)


def test_hard_prompts_get_more() -> None:
    """A third rollout of 0.95 adds 4 x 0.05^3 x 0.0475 to pass@4, one of 0.05 adds 4 x 0.95^3 x 0.0475."""
    assert allocate([0.95, 0.05], 16, least=2, most=14) == [2, 14]
    assert allocate([0.95, 0.05], 16, least=2, most=14, k=1) == [8, 8]
    # 0 of 16 under Beta(1, 3): 1 / 20. Rates that a power of 1 - p underflows for, and both ends.
    rates = PassRates(1.0, {"unsolved": (16.0, 0.0), "solved": (16.0, 16.0)}, (1.0, 3.0))
    assert allocate([rates.estimate(name) for name in rates.counts], 16, least=2, most=14, k=1024) == [14, 2]
    assert allocate([1 - 1e-12, 1e-12, 1.0, 0.0], 16, least=1, most=10, k=512) == [4, 10, 1, 1]
    with pytest.raises(ValueError, match="the rate of prompt 1 is nan"):
        allocate([0.5, math.nan], 8, least=2, most=6)


@pytest.mark.parametrize(("total", "least", "most"), [(5, 1, 2), (8, 4, 2), (8, 0, 8)])
def test_bounds_that_cannot_be_kept(total: int, least: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"{total} rollouts for 2 prompts"):
        allocate([0.5, 0.5], total, least=least, most=most)


def test_a_rate_is_the_prompts_own_over_all_prompts_as_a_prior() -> None:
    """Without a fit Beta(1, 1): (1 + 2) / (2 + 8). Decayed by half: 4 + 8 answers, 1 + 6 right."""
    rates = PassRates(0.5)
    assert rates.estimate("new") == 0.5
    rates.add({"a": (8, 2)})
    assert rates.estimate("a") == pytest.approx(3 / 10)
    rates.add({"a": (8, 6)})
    assert rates.counts["a"] == (12.0, 7.0)
    assert rates.estimate("a") == pytest.approx(8 / 14)


def test_many_prompts_make_a_prior() -> None:
    rates = PassRates(0.9)
    rates.add({str(number): (8, 0 if number % 3 else 3) for number in range(60)})
    a, b = rates.prior
    assert a / (a + b) == pytest.approx(1 / 8, rel=0.3)
    assert rates.estimate("new") < 0.2
    again = PassRates(0.9)
    again.restore(json.loads(json.dumps(rates.to_json())))
    assert again == rates
