"""Means over prompts, their intervals, and what is left out."""

from __future__ import annotations

import math

import pytest

from recipe.offpolicy.extensions.pass_at_k import unbiased, unbiased_dynamic
from recipe.offpolicy.extensions.pass_at_k.summary import Stopping, summarize


def test_means_over_prompts_of_several_sizes() -> None:
    found = summarize([8, 8, 16], [1, 8, 0], [1, 4, 16], draws=200)
    value, low, high = found.points[4]
    assert value == pytest.approx((0.5 + 1 + 0) / 3)
    assert low < value < high
    assert found.left_out == (16,)
    assert (found.prompts, found.samples, found.unsolved) == (3, 32, 1 / 3)
    assert found.fit is None


def test_the_interval_is_over_prompts() -> None:
    """pass@1 of 400 prompts, half of them solved: 0.5 +- 1.96 * 0.5 / 20."""
    found = summarize([4] * 400, [4, 0] * 200, [1])
    _, low, high = found.points[1]
    assert low == pytest.approx(0.5 - 0.049, abs=0.01)
    assert high == pytest.approx(0.5 + 0.049, abs=0.01)
    value, low, high = summarize([4], [1], [1]).points[1]
    assert value == 0.25
    assert math.isnan(low)
    assert math.isnan(high)


def test_sampling_that_ended_early_is_estimated_by_its_rule() -> None:
    stopping = Stopping((8, 16, 32), 1)
    found = summarize([8, 16, 32], [3, 1, 0], [8, 32, 64], stopping=stopping, draws=100)
    wanted = [unbiased_dynamic((8, 16, 32), n, c, 8, successes=1) for n, c in ((8, 3), (16, 1), (32, 0))]
    assert found.points[8][0] == pytest.approx(sum(wanted) / 3)
    assert found.points[8][0] < (unbiased(8, 3, 8) + unbiased(16, 1, 8) + 0) / 3
    assert set(found.points) == {8, 32}
    assert found.left_out == (64,)


def test_the_fit_or_why_there_is_none() -> None:
    found = summarize([8] * 40, [0, 1, 2, 6] * 10, [1], extrapolate=[64], draws=50)
    assert found.fit is not None
    assert found.points[1][0] < found.fit.points[64][0] < 1
    none = summarize([8] * 40, [8] * 40, [1], extrapolate=[64], draws=50)
    assert (none.fit, none.not_identified) == (None, "all samples are right.")


@pytest.mark.parametrize(("n", "c"), [([], []), ([8], [1, 2])])
def test_counts_have_to_be_there(n: list[int], c: list[int]) -> None:
    with pytest.raises(ValueError, match="expected one of each"):
        summarize(n, c, [1])
