"""Statistics carry their own reduction, so that parts add up to the whole."""

from __future__ import annotations

import math

import pytest
import torch
from corrections import GSM, TIS, opsm, run, spec, tensor, values

from recipe.offpolicy.correction import Reduction, Statistic
from recipe.offpolicy.correction import statistics as st

LOG = math.log
X = tensor([[1.0, 2.0, 6.0, math.nan]])
WHERE = torch.tensor([[True, True, True, False]])


def test_by_hand() -> None:
    """Of 1, 2 and 6: mean 3, variance (4 + 1 + 9) / 3 = 14/3, ESS 9^2 / (3 x 41) = 0.6585."""
    assert st.mean(X, WHERE).value() == pytest.approx(3.0)
    assert st.std(X, WHERE).value() == pytest.approx(math.sqrt(14 / 3))
    assert st.std(X, WHERE, about=1.0).value() == pytest.approx(math.sqrt(14 / 3))
    assert st.effective_sample_size(X, WHERE).value() == pytest.approx(81 / 123)
    assert st.minimum(X, WHERE).value() == 1.0
    assert st.maximum(X, WHERE).value() == 6.0
    assert st.total(torch.tensor([True, True, False])).value() == 2.0
    assert st.share(torch.tensor([True, False]), torch.tensor([True, True])).value() == 0.5


def test_of_nothing() -> None:
    """Counts are 0; what divides by a count, and extremes, are NaN."""
    nothing = torch.zeros_like(WHERE)
    for statistic in (
        st.mean(X, nothing),
        st.std(X, nothing),
        st.effective_sample_size(X, nothing),
        st.minimum(X, nothing),
        st.maximum(X, nothing),
        st.share(nothing, nothing),
    ):
        assert math.isnan(statistic.value())
    assert st.total(nothing).value() == 0.0


def test_nothing_is_neutral_in_a_merge() -> None:
    for make in (st.mean, st.std, st.effective_sample_size, st.minimum, st.maximum):
        some, none = make(X, WHERE), make(X, torch.zeros_like(WHERE))
        assert some.merge(none).value() == none.merge(some).value() == some.value()


def test_merge_by_hand() -> None:
    """Means travel as sum and count: 1 token of 5 and 3 of 1 give (5 + 3) / 4 = 2, not (5 + 1) / 2 = 3."""
    one, two = Statistic(Reduction.MEAN, (5.0, 1.0)), Statistic(Reduction.MEAN, (3.0, 3.0))
    assert one.merge(two).value() == 2.0
    assert Statistic(Reduction.MIN, (1.0,)).merge(Statistic(Reduction.MIN, (-1.0,))).value() == -1.0
    assert Statistic(Reduction.MAX, (1.0,)).merge(Statistic(Reduction.MAX, (-1.0,))).value() == 1.0
    assert Statistic(Reduction.SUM, (1.0,)).merge(Statistic(Reduction.SUM, (2.0,))).value() == 3.0


def test_merging_two_kinds_is_an_error() -> None:
    with pytest.raises(ValueError, match="mean with sum"):
        Statistic(Reduction.MEAN, (1.0, 1.0)).merge(Statistic(Reduction.SUM, (1.0,)))


def test_a_standard_deviation_near_1_keeps_its_digits() -> None:
    """Ratios 1 +- 1e-6: E[x^2] - E[x]^2 about 0 would lose all digits in float32 and most in float64."""
    ratios = 1.0 + 1e-6 * tensor([[1.0, -1.0] * 500], torch.float64)
    assert st.std(ratios, torch.ones_like(ratios).bool(), about=1.0).value() == pytest.approx(1e-6, rel=1e-6)


def test_sums_are_in_float64() -> None:
    """2^24 + 1 is where a count in float32 stands still."""
    ones = torch.ones(2**24 + 3, dtype=torch.bool)
    assert st.total(ones).value() == 2**24 + 3


def test_to_host_moves_values_and_leaves_floats() -> None:
    statistics = {"a": st.mean(X, WHERE), "b": st.maximum(X, WHERE), "c": st.total(WHERE)}
    host = st.to_host(statistics)
    assert {name: one.value() for name, one in host.items()} == {"a": 3.0, "b": 6.0, "c": 3.0}
    assert all(type(part) is float for one in host.values() for part in one.parts)
    assert [one.reduction for one in host.values()] == [one.reduction for one in statistics.values()]
    assert st.to_host({}) == {}
    assert st.to_host(host) == host


def test_merge_all_merges_by_name() -> None:
    merged = st.merge_all([{"a": Statistic(Reduction.SUM, (1.0,))}, {}, {"a": Statistic(Reduction.SUM, (2.0,))}])
    assert {name: one.value() for name, one in merged.items()} == {"a": 3.0}


# What the two stages report ---------------------------------------------------------------------------------


def test_the_mismatch_by_hand() -> None:
    """log rho = 0.5 and -0.1: mean 0.2, mean size 0.3, deviation 0.3.

    KL(mu || pi_old): k1 = -0.2; k3 = mean of e^0.5 - 1 - 0.5 = 0.14872 and e^-0.1 - 1 + 0.1 = 0.0048374: 0.0767793.
    """
    result = values(run(spec(), mu=[[0.0, 0.0]], old=[[0.5, -0.1]]))
    assert result["log_prob_difference/mean"] == pytest.approx(0.2, abs=1e-7)
    assert result["log_prob_difference/abs_mean"] == pytest.approx(0.3, abs=1e-7)
    assert result["log_prob_difference/std"] == pytest.approx(0.3, abs=1e-7)
    assert result["kl/k1"] == pytest.approx(-0.2, abs=1e-7)
    assert result["kl/k3"] == pytest.approx(0.0767793, abs=1e-6)
    assert result["rollout_ratio/min"] == pytest.approx(math.exp(-0.1))
    assert result["rollout_ratio/max"] == pytest.approx(math.exp(0.5))


def test_masked_shares_by_hand() -> None:
    """Rows of 3, 1 and 2 response tokens, one of them without mu; GSM drops the first row.

    Tokens: kept 0 + 1 + 1 of 6, so that 4 of 6 are masked, 3 of 6 by GSM. Rows: 2 of 3 kept, 1 of 3 dropped.
    """
    step = run(
        spec(gsm=GSM, opsm=opsm(0.1)),
        mu=[[0.0] * 3, [0.0] * 3, [0.0, math.nan, 0.0]],
        old=[[1.0] * 3, [0.0] * 3, [0.0] * 3],
        mask=[[1, 1, 1], [1, 0, 0], [1, 1, 0]],
    )
    result = values(step)
    assert result["keep/token_share"] == pytest.approx(2 / 6)
    assert result["keep/token_mask_ratio"] == pytest.approx(4 / 6)
    assert result["keep/sequence_share"] == pytest.approx(2 / 3)
    assert result["mask/gsm/masked_token_share"] == pytest.approx(3 / 6)
    assert result["mask/gsm/masked_sequence_share"] == pytest.approx(1 / 3)
    assert result["mask/opsm/masked_token_share"] == 0.0
    assert result["mask/opsm/masked_sequence_share"] == 0.0


def test_statistics_see_the_original_mask() -> None:
    """Rule 3: a dropped row stays in the statistics; else the mismatch would look small where masks act."""
    rows = dict(mu=torch.zeros(2, 1), old=[[1.0], [0.0]])
    masked, plain = values(run(spec(gsm=GSM), **rows)), values(run(spec(), **rows))
    assert masked["keep/sequence_share"] == 0.5
    assert {name: masked[name] for name in plain if not name.startswith("keep/")} == {
        name: value for name, value in plain.items() if not name.startswith("keep/")
    }


def test_names_are_the_same_whatever_the_data() -> None:
    """Every rank and step must report the same keys; they become the logger's names."""
    correction = spec(TIS, gsm=GSM, opsm=opsm(0.1))
    live = run(correction, mu=[[-1.0]], old=[[-1.1]], advantages=-1)
    empty = run(correction, mu=[[-1.0]], old=[[-1.1]], mask=[[0]])
    assert list(live.statistics) == list(empty.statistics)
    assert {"weight/truncated_share", "mask/gsm/masked_sequence_share", "mask/opsm/masked_token_share"} <= set(
        live.statistics
    )


def test_a_minimum_or_maximum_is_said_in_the_last_part_of_a_name_only() -> None:
    """verl chooses min and max by substring of the name."""
    for name, statistic in run(spec(TIS, gsm=GSM), mu=[[0.0]], old=[[0.0]]).statistics.items():
        extreme = statistic.reduction in (Reduction.MIN, Reduction.MAX)
        assert ("min" in name or "max" in name) == extreme, name
