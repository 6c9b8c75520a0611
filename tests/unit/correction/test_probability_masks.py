"""Masks on probabilities of the sampled token, and on tokens that lead away: by hand, from the peers' public rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.corrections import band, kept, run, spec
from tests.support.presets import PRESETS
from tests.support.refusals import mask, refused

LOG = math.log


def coins(p: float, q: float) -> float:
    return p * LOG(p / q) + (1 - p) * LOG((1 - p) / (1 - q))


def test_kpop_by_hand() -> None:
    """p_mu = 0.5: KL(0.7, 0.5) = 0.0823 and KL(0.5, 0.7) = 0.0872, kept; at 0.75 they are 0.1308 and 0.1438, dropped.

    From p_mu = 0.02 to 0.08 the ratio is 4, and the two divergences are 0.0568 and 0.0337: kept.
    """
    assert [round(coins(*pair), 4) for pair in ((0.7, 0.5), (0.5, 0.7), (0.08, 0.02))] == [0.0823, 0.0872, 0.0528]
    mu, pi = [[0.5, 0.5, 0.02]], [[0.7, 0.75, 0.08]]
    rows: dict[str, Any] = dict(mu=torch.tensor(mu).log(), old=torch.tensor(mu).log(), pi=torch.tensor(pi).log())
    assert run(PRESETS["paper/kpop"], **rows).keep.tolist() == [[True, False, True]]


@pytest.mark.parametrize(("p", "q"), [(0.9, 0.6), (0.3, 0.8), (1.0, 0.5), (1e-30, 0.5), (0.999999, 0.2)])
def test_either_direction_of_the_divergence(p: float, q: float) -> None:
    """Clamped to [1e-6, 1 - 1e-6], as prime-rl does; just below the greater of the two drops, just above keeps."""
    near = [min(max(value, 1e-6), 1 - 1e-6) for value in (p, q)]
    value = max(coins(near[0], near[1]), coins(near[1], near[0]))
    rows: dict[str, Any] = dict(mu=[[LOG(q)]], old=[[LOG(p)]], dtype=torch.float64)
    shape: dict[str, Any] = dict(level="token", aggregate="binary_kl")
    assert kept(run(spec(m=band(None, value * 1.0001, **shape)), **rows)) == [True]
    assert kept(run(spec(m=band(None, value * 0.9999, **shape)), **rows)) == [False]


def test_nemo_outlier_by_hand() -> None:
    """mean exp|d|: (e^0.5 + e^1 + 1) / 3 = 1.789, kept; (e^1.5 + e^0.5 + 1) / 3 = 2.377, dropped, though d cancels."""
    mu = [[0.5, -1.0, 0.0], [1.5, -0.5, 0.0]]
    assert kept(run(PRESETS["nemo/outlier"], mu=mu, old=torch.zeros(2, 3))) == [True, False]


def test_a_mean_distance_that_is_the_bound_is_kept() -> None:
    """exp|log 2| = exp|log 0.5| = 2, of two tokens."""
    assert kept(run(PRESETS["nemo/outlier"], mu=[[LOG(2), LOG(0.5)]], old=[[0.0, 0.0]])) == [True]


def test_differences_of_probabilities_by_row_and_turn() -> None:
    """p_old - p_mu = 0.3, 0.2, -0.1 and -0.6, tool token left out: row mean -0.05, turns 0.25 and -0.35; sum -0.2."""
    mu = torch.tensor([[0.5, 0.5, 0.1, 0.5, 0.9]]).log()
    old = torch.tensor([[0.8, 0.7, 0.9, 0.4, 0.3]]).log()
    rows: dict[str, Any] = dict(mu=mu, old=old, mask=[[1, 1, 0, 1, 1]], turns=[[0, 0, 0, 1, 1]])
    none, first, all_of_it = [[0, 0, 0, 0, 0]], [[1, 1, 0, 0, 0]], [[1, 1, 0, 1, 1]]
    assert run(PRESETS["roll/diff"], **rows).keep.long().tolist() == all_of_it
    assert run(PRESETS["roll/diff_turn"], **rows).keep.long().tolist() == none
    by_turn = spec(m=band(-0.3, 0.3, level="turn", aggregate="binary_tv_mean"))
    assert run(by_turn, **rows).keep.long().tolist() == first
    for lower, expected in ((-0.21, all_of_it), (-0.19, none)):
        total = spec(m=band(lower, 0.5, aggregate="binary_tv_sum"))
        assert run(total, **rows).keep.long().tolist() == expected


def test_vaco_by_hand() -> None:
    """|rho - 1| / 2 of rho = 6, 0.5 and 1 is 2.5, 0.25 and 0: mean 0.917, within 1; of rho = 8, 0.5, 1 it is 1.25.

    A > 0 takes rho = 8 further up: dropped. rho = 0.5 is brought back, rho = 1 leads nowhere. A < 0: the reverse.
    """
    near, far = [LOG(6), LOG(0.5), 0.0], [LOG(8), LOG(0.5), 0.0]
    step = run(PRESETS["paper/vaco"], mu=torch.zeros(3, 3), old=[near, far, far], advantages=[1.0, 1.0, -1.0])
    assert step.keep.tolist() == [[True] * 3, [False, True, True], [True, False, True]]


def test_outward_by_the_sign_of_the_row_or_of_the_token() -> None:
    """The row's advantage is (3 - 1) / 2 > 0; log r = 1 on both tokens. By its own sign the second leads back."""
    rows: dict[str, Any] = dict(mu=[[0.0, 0.0]], old=[[1.0, 1.0]], advantages=torch.tensor([[3.0, -1.0]]))
    shape: dict[str, Any] = dict(level="token", aggregate="product", when="outward")
    assert run(spec(m=band(None, 2.0, **shape)), **rows).keep.tolist() == [[False, False]]
    assert run(spec(m=band(None, 2.0, sign="token", **shape)), **rows).keep.tolist() == [[False, True]]


def test_the_ratio_of_the_mask_says_where_outward_is() -> None:
    """pi / mu = 2 and pi / pi_old = 1/2: with A > 0 the update leaves mu and comes back to pi_old."""
    rows: dict[str, Any] = dict(mu=[[0.0]], old=[[LOG(4)]], pi=[[LOG(2)]], advantages=1.0)
    for ratio, expected in (("full", False), ("ppo", True)):
        shape = band(None, 0.1, level="token", aggregate="tv_sum", ratio=ratio, when="outward")
        assert kept(run(spec(m=shape), **rows)) == [expected]


def test_bounds_that_these_aggregates_cannot_have() -> None:
    shape: dict[str, Any] = dict(aggregate="exp_abs_mean", lower=None)
    refused(mask(**shape, upper=0.9), "correction.masks.gsm.upper=0.9", "never below 1", "Set a bound >= 1")
    refused(mask(aggregate="exp_abs_mean", lower=1.0, upper=None), "never lies outside")
    refused(mask(aggregate="binary_kl", lower=None, upper=-0.1), "never negative")
    refused(mask(aggregate="binary_kl", lower=None, upper=14.0), "never lies outside")
    refused(mask(aggregate="binary_tv_mean", lower=-1.5, upper=0.5), "lies in [-1, 1]")
    stale = {"aggregate": "staleness", "level": "token", "upper": 4, "when": "outward"}
    refused({"masks": {"m": stale}}, "correction.masks.m.when=outward", "no such choice")
