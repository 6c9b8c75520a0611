"""Statistics carry their own reduction, so parts add up to the whole."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.correction import statistics as st
from recipe.offpolicy.correction.telemetry import Moments
from tests.support.corrections import tensor

SUM, MEAN, STD, ESS, CHI2 = (Reduction(name) for name in ("sum", "mean", "std", "ess", "chi2"))


def moments(weights: Tensor) -> Moments:
    above = weights.double() - 1
    empty = not above.numel()
    return Moments(
        excess=above.sum(),
        square=above.square().sum(),
        count=torch.tensor(float(above.numel()), dtype=torch.float64),
        least=torch.tensor(math.nan if empty else above.min().item()),
        greatest=torch.tensor(math.nan if empty else above.max().item()),
    )


@pytest.mark.parametrize("nats", [*range(-36, 21, 2)])
def test_the_ess_is_right_at_any_scale_or_not_known(nats: int) -> None:
    """Moments about 1 lose the digits of weights far below 1, and an ESS of rounding errors is not a number
    in (0, 1].
    """
    weights = (0.3 * torch.randn(1000, generator=torch.Generator().manual_seed(0)).double() + nats).exp()
    exact = float(weights.sum().square() / (len(weights) * weights.square().sum()))
    found = moments(weights).build_statistics("w")["w/ess"].value()
    assert found == pytest.approx(exact, rel=1e-3) if nats > -13 else math.isnan(found)


def test_of_nothing() -> None:
    """A sum is 0; a mean and an extreme are NaN."""
    nothing = torch.zeros((), dtype=torch.float64)
    statistics = moments(torch.zeros(0)).build_statistics("w") | {
        "share": Statistic(MEAN, (nothing, nothing)),
        "perplexity": Statistic(Reduction.PERPLEXITY, (nothing, nothing)),
    }
    assert {name: math.isnan(one.value()) for name, one in statistics.items()} == dict.fromkeys(statistics, True)
    assert Statistic(SUM, (nothing,)).value() == 0.0


def test_merging_two_kinds_is_an_error() -> None:
    with pytest.raises(ValueError, match="mean with sum"):
        Statistic(MEAN, (1.0, 1.0)).merge(Statistic(SUM, (1.0,)))


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [(STD, lambda s: s), (CHI2, lambda s: s * s), (MEAN, lambda s: 1.0), (ESS, lambda s: 1.0)],
)
def test_near_1_there_are_digits(reduction: Reduction, expected: Callable[[float], float]) -> None:
    """For weights 1 +- 1e-7, E[w^2] - 1 and E[w^2] - E[w]^2 would be rounding errors."""
    size = 1e-7
    ratios = 1.0 + size * tensor([1.0, -1.0] * 500, torch.float64)
    result = moments(ratios).build_statistics("w")[f"w/{reduction.value}"].value()
    assert result == pytest.approx(expected(size), rel=1e-6)


def of_a_rank(rank: int) -> dict[str, Statistic]:
    """Statistics of each kind with rounded sums; every third rank counts nothing, and some share parts."""
    count, value = float(rank % 3), 0.1 * (rank + 1)
    shared = (value, value * value, count)
    return {
        "sum": Statistic(SUM, (-0.0 if rank == 0 else value,)),
        "mean": Statistic(MEAN, (value, count), about=1.0),
        "std": Statistic(STD, shared),
        "std again": Statistic(STD, shared),
        "ess": Statistic(ESS, shared),
        "least": Statistic(Reduction.MIN, (-value, count), about=1.0),
        "greatest": Statistic(Reduction.MAX, (math.nan if not count else value, count)),
    }


def bits(statistics: Mapping[str, Statistic]) -> list[tuple[str, str]]:
    return [(name, repr(one)) for name, one in statistics.items()]


@pytest.mark.parametrize("ranks", [1, 2, 7, 100])
def test_flat_statistics_merge_as_others_to_the_bit(ranks: int) -> None:
    samples = [of_a_rank(rank) for rank in range(ranks)]
    flat = [pickle.loads(pickle.dumps(st.flatten(one))) for one in samples]
    assert [bits(one) for one in flat] == [bits(one) for one in samples]
    merged = st.merge_all(samples)
    assert bits(st.merge_all(flat)) == bits(st.merge_all([{}, *flat, {}])) == bits(merged)
    # As where one of them reports on something else, or has not travelled.
    assert bits(st.merge_all([*flat[:-1], samples[-1]])) == bits(merged)
    other = samples[-1] | {"other": Statistic(SUM, (2.0,))}
    assert bits(st.merge_all([*flat[:-1], st.flatten(other)])) == bits(st.merge_all([*samples[:-1], other]))
