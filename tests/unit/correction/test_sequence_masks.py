"""Masks by row: which rows are dropped, by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.correction import rollout_stage, step_stage
from tests.support.corrections import GSM, band, kept, opsm, random_rows, run, spec, tensor, values

LOG = math.log


def constant_drift(log_rho: float, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A row whose tokens all have the log-ratio pi_old / mu, to the last bit (mu is 0)."""
    return dict(mu=torch.zeros(1, tokens), old=torch.full((1, tokens), log_rho), dtype=dtype)


# Geometric sequence mask ------------------------------------------------------------------------------------


def test_gsm_by_hand() -> None:
    """exp(mean log rho) in [0.99, 1.01], that is mean log rho in [-0.01005, 0.00995].

    Row 0: (0.03 - 0.01 - 0.02) / 3 = 0, kept though each token is outside.
    Row 1: (0.02 + 0.01 + 0.003) / 3 = 0.011, dropped. Row 2: -0.033 / 3 = -0.011, dropped.
    """
    old = [[0.03, -0.01, -0.02], [0.02, 0.01, 0.003], [-0.02, -0.01, -0.003]]
    assert kept(run(spec(gsm=GSM), mu=torch.zeros(3, 3), old=old)) == [True, False, False]


def test_gsm_is_not_the_arithmetic_mean() -> None:
    """rho = 1.5 and 0.5 have the mean 1, which a mask on it would keep; geometric sqrt(0.75) = 0.866 is dropped."""
    assert kept(run(spec(gsm=GSM), mu=[[0.0, 0.0]], old=[[LOG(1.5), LOG(0.5)]])) == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("bound", [0.99, 1.01])
def test_gsm_keeps_the_bound_and_drops_the_next_number(bound: float, tokens: int, dtype: torch.dtype) -> None:
    """Inclusive: the float32 log of the bound is inside, one float32 step away from 0 is outside."""
    at = np.float32(LOG(bound))
    beyond = np.nextafter(at, np.float32(math.copysign(1.0, at)))
    assert kept(run(spec(gsm=GSM), **constant_drift(float(at), tokens, dtype))) == [True]
    assert kept(run(spec(gsm=GSM), **constant_drift(float(beyond), tokens, dtype))) == [False]


@pytest.mark.parametrize("bound", [0.99, 1.01])
def test_gsm_keeps_the_bound_in_float64(bound: float) -> None:
    """log_probs in float64 hit log(bound) closer than float32 can say; the row is at the bound all the same."""
    rows = dict(mu=torch.zeros(1, 4, dtype=torch.float64), old=torch.full((1, 4), LOG(bound), dtype=torch.float64))
    assert kept(run(spec(gsm=GSM), **rows, dtype=torch.float64)) == [True]


def test_one_side_alone() -> None:
    old = [[LOG(0.9)], [LOG(1.1)]]
    assert kept(run(spec(m=band(0.99, None)), mu=torch.zeros(2, 1), old=old)) == [False, True]
    assert kept(run(spec(m=band(None, 1.01)), mu=torch.zeros(2, 1), old=old)) == [True, False]


def test_tool_tokens_are_not_of_the_mean() -> None:
    """Valid tokens: mean (0.012 + 0.006) / 2 = 0.009, kept; with the tool token's 0.3 it would be 0.106."""
    rows = dict(mu=[[0.0] * 3], old=[[0.012, 0.3, 0.006]])
    assert run(spec(gsm=GSM), **rows, mask=[[1, 0, 1]]).keep.tolist() == [[True, False, True]]
    assert not run(spec(gsm=GSM), **rows).keep.any()


def test_tiling_a_row_leaves_the_decision() -> None:
    """Mean over 2 and over 2000 tokens is the same; a product would grow from 1.02 to 1.02^1000 = 3.98e8."""
    for row, expected in (([0.014, 0.006], False), ([0.014, 0.004], True)):
        for times in (1, 3, 1000):
            assert kept(run(spec(gsm=GSM), mu=torch.zeros(1, 2 * times), old=[row * times])) == [expected]


def test_two_opposite_outliers_pass_the_geometric_mask() -> None:
    """rho = 1e-5 and 1e5 have the geometric mean 1."""
    assert kept(run(spec(gsm=GSM), mu=[[0.0, 0.0]], old=[[LOG(1e-5), -LOG(1e-5)]])) == [True]


@pytest.mark.parametrize(("tokens", "expected"), [(1145, False), (1146, True)])
def test_one_outlier_passes_the_geometric_mask_in_a_long_row(tokens: int, expected: bool) -> None:
    """log(1e-5) / T >= log 0.99 iff T >= 11.51293 / 0.01005034 = 1145.5."""
    old = torch.zeros(1, tokens)
    old[0, 500] = LOG(1e-5)
    assert kept(run(spec(gsm=GSM), mu=torch.zeros(1, tokens), old=old)) == [expected]


# Product mask -----------------------------------------------------------------------------------------------


def test_a_product_rejects_what_a_geometric_mean_keeps() -> None:
    """1.001^2000 = 7.3817 (not e^2 = 7.3891) lies outside [0.5, 2]; its geometric mean 1.001 is the bound."""
    rows = constant_drift(LOG(1.001), 2000)
    assert kept(run(spec(m=band(0.5, 2.0, aggregate="product")), **rows)) == [False]
    assert kept(run(spec(m=band(None, 1.001)), **rows)) == [True]
    assert kept(run(spec(m=band(None, 1.0009999)), **rows)) == [False]
    assert kept(run(spec(m=band(None, 7.3816, aggregate="product")), **rows)) == [False]
    assert kept(run(spec(m=band(None, 7.3818, aggregate="product")), **rows)) == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_at_its_bound(dtype: torch.dtype) -> None:
    at = np.float32(LOG(2.0))
    beyond = float(np.nextafter(at, np.float32(1)))
    mask = spec(m=band(0.5, 2.0, aggregate="product"))
    assert kept(run(mask, mu=[[0.0, 0.0]], old=[[float(at) / 2, float(at) / 2]], dtype=dtype)) == [True]
    assert kept(run(mask, mu=[[0.0, 0.0]], old=[[beyond / 2, beyond / 2]], dtype=dtype)) == [False]
    assert kept(run(mask, mu=[[0.0, 0.0]], old=[[-float(at), 0.0]], dtype=dtype)) == [True]


@pytest.mark.parametrize(("tokens", "geometric", "product"), [(10, 0.71, 1.00), (100, 1.00, 0.98), (1000, 1.00, 0.535)])
def test_length_and_noise(tokens: int, geometric: float, product: float) -> None:
    """Under noise of 0.03 nats a token the geometric mask drops short rows, the product long ones.

    With z normal: the mean of T tokens deviates by 0.03 / sqrt(T), so T = 10 keeps P(|z| < 0.01 / 0.00949) = 0.71
    and T = 100 P(|z| < 3.3) = 1.00. Their sum deviates by 0.03 sqrt(T), and log 2 = 0.693: T = 100 keeps
    P(|z| < 2.31) = 0.98 and T = 1000 P(|z| < 0.731) = 0.535.
    """
    rows = 400
    noise = 0.03 * torch.randn(rows, tokens, generator=torch.Generator().manual_seed(0))
    step = run(spec(geo=GSM, product=band(0.5, 2.0, aggregate="product")), mu=torch.zeros(rows, tokens), old=noise)
    result = values(step)
    # Three standard errors of a share of 400 rows are at most 0.075.
    assert 1 - result["mask/geo/masked_sequence_share"] == pytest.approx(geometric, abs=0.075)
    assert 1 - result["mask/product/masked_sequence_share"] == pytest.approx(product, abs=0.075)


# Off-policy sequence masking --------------------------------------------------------------------------------


def test_opsm_by_hand() -> None:
    """Dropped iff A < 0 and mean log(mu / pi) > 0.1.

    mean log(mu/pi) of the rows: (0.3 + 0.1) / 2 = 0.2 > 0.1; the same with A > 0; with A = 0; and
    (0.3 - 0.2) / 2 = 0.05 with A < 0.
    """
    pi = [[-0.3, -0.1], [-0.3, -0.1], [-0.3, -0.1], [-0.3, 0.2]]
    step = run(
        spec(opsm=opsm(0.1)), mu=torch.zeros(4, 2), old=torch.zeros(4, 2), pi=pi, advantages=[-1.0, 1.0, 0.0, -1.0]
    )
    assert kept(step) == [False, True, True, True]
    assert values(step)["mask/opsm/masked_sequence_share"] == 0.25


def test_opsm_is_one_sided() -> None:
    """pi far above mu is not dropped: log(mu/pi) = -5 < delta."""
    assert kept(run(spec(opsm=opsm(0.1)), mu=[[0.0]], old=[[0.0]], pi=[[5.0]], advantages=-1)) == [True]


@pytest.mark.parametrize("advantage", [0.0, 1e-30, 3.0])
def test_opsm_never_drops_a_row_that_did_not_lose(advantage: float) -> None:
    assert run(spec(opsm=opsm(0.0)), mu=[[0.0]], old=[[0.0]], pi=[[-50.0]], advantages=advantage).keep.all()


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [0.125, 0.5])
def test_opsm_keeps_exactly_delta(delta: float, dtype: torch.dtype, tokens: int) -> None:
    """Strict >: mean log(mu/pi) = delta is kept, 2^-10 more is dropped (all are exact in each dtype)."""
    zeros = torch.zeros(1, tokens)
    at = dict(mu=zeros, old=zeros, dtype=dtype, advantages=-1)
    step = 2.0**-10 if dtype is not torch.bfloat16 else 2.0**-8
    assert kept(run(spec(opsm=opsm(delta)), pi=torch.full((1, tokens), -delta), **at)) == [True]
    assert kept(run(spec(opsm=opsm(delta)), pi=torch.full((1, tokens), -delta - step), **at)) == [False]


def test_opsm_with_a_delta_of_zero_is_a_no_op_at_agreement() -> None:
    assert run(spec(opsm=opsm(0.0)), mu=[[-1.5]], old=[[-1.5]], pi=[[-1.5]], advantages=-1).keep.all()
    assert not run(spec(opsm=opsm(0.0)), mu=[[-1.5]], old=[[-1.5]], pi=[[-1.5001]], advantages=-1).keep.any()


def test_opsm_compares_pi_with_mu_not_with_pi_old() -> None:
    """pi = pi_old, both 0.2 below mu: dropped by the full ratio, kept by pi / pi_old."""
    rows = dict(mu=[[0.0]], old=[[-0.2]], pi=[[-0.2]], advantages=-1)
    assert kept(run(spec(m=opsm(0.1)), **rows)) == [False]
    assert kept(run(spec(m=opsm(0.1, "ppo")), **rows)) == [True]
    assert kept(run(spec(m=opsm(0.1, "rollout")), **rows)) == [False]


def test_the_sign_is_that_of_the_rows_mean_advantage() -> None:
    """Mean over valid tokens: (3 - 1 - 1) / 3 > 0 keeps; without the first token (-1 - 1) / 2 < 0 drops."""
    rows = dict(mu=[[0.0] * 3], old=[[0.0] * 3], pi=[[-1.0] * 3], advantages=[[3.0, -1.0, -1.0]])
    assert run(spec(opsm=opsm(0.1)), **rows).keep.all()
    assert not run(spec(opsm=opsm(0.1)), **rows, mask=[[0, 1, 1]]).keep.any()


def test_positive_rows_can_be_meant_too() -> None:
    step = run(
        spec(m=band(None, 1.01, ratio="full", when="positive")),
        mu=torch.zeros(3, 1),
        old=torch.zeros(3, 1),
        pi=torch.ones(3, 1),
        advantages=[-1.0, 0.0, 1.0],
    )
    assert kept(step) == [True, True, False]


def test_a_lower_bound_says_the_same_as_delta() -> None:
    log_pi = -torch.linspace(0.0, 0.2, 41)[:, None]
    zeros = torch.zeros(41, 1)
    written = {key: value for key, value in opsm(0.1).items() if key != "delta"} | {
        "lower": math.exp(-0.1),
        "upper": None,
    }
    rows = dict(mu=zeros, old=zeros, pi=log_pi, advantages=-1)
    assert kept(run(spec(m=opsm(0.1)), **rows)) == kept(run(spec(m=written), **rows))


# Factored OPSM ----------------------------------------------------------------------------------------------

FACTORED = spec(mismatch=opsm(0.1, "rollout"), staleness=opsm(0.2, "ppo"))


def test_factored_opsm_has_two_budgets() -> None:
    """Mismatch log(mu/pi_old) has the budget 0.1, staleness log(pi_old/pi) the budget 0.2.

    Rows (mismatch, staleness): (0.05, 0.15) inside both; (0.15, 0) over the first; (0, 0.25) over the second;
    (-0.3, 0.25) over the second although their sum is -0.05; (0.15, 0.25) over both, but A > 0.
    """
    mismatch = tensor([[0.05], [0.15], [0.0], [-0.3], [0.15]])
    staleness = tensor([[0.15], [0.0], [0.25], [0.25], [0.25]])
    old = -mismatch
    step = run(FACTORED, mu=torch.zeros(5, 1), old=old, pi=old - staleness, advantages=[-1.0, -1, -1, -1, 1])
    assert kept(step) == [True, False, False, False, True]
    result = values(step)
    assert result["mask/mismatch/masked_sequence_share"] == pytest.approx(1 / 5)
    assert result["mask/staleness/masked_sequence_share"] == pytest.approx(2 / 5)


def test_factored_terms_add_up_to_the_direct_one() -> None:
    """Mean log(pi/mu) = mean log(pi_old/mu) + mean log(pi/pi_old), to 1e-6.

    The direct statistic is found from outside: the delta at which the direct mask starts to keep the row.
    """
    mu, old, pi, mask = random_rows()
    count = mask.sum(-1).clamp(min=1)
    direct = ((mu - pi) * mask).sum(-1) / count
    stage = rollout_stage(FACTORED, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    mismatch = -stage.log_ratio.sum(-1) / count
    staleness = ((old - pi) * mask).sum(-1) / count
    assert (mismatch + staleness - direct).abs().max() < 1e-6
    for row in range(len(mu)):
        if direct[row] <= 1e-5:
            continue
        one = dict(mu=mu[row : row + 1], old=old[row : row + 1], pi=pi[row : row + 1], mask=mask[row : row + 1])
        total = float(mismatch[row] + staleness[row])
        assert run(spec(m=opsm(total + 1e-6)), **one, advantages=-1).keep.any()
        assert not run(spec(m=opsm(total - 1e-6)), **one, advantages=-1).keep.any()


def test_only_the_staleness_term_follows_pi() -> None:
    """After an optimizer step log pi has moved: the staleness mask decides anew, the mismatch mask as before."""
    mu, old, _, mask = random_rows()
    stage = rollout_stage(FACTORED, old_log_prob=old, rollout_log_prob=mu, response_mask=mask)
    negative = torch.full_like(old, -1.0)
    before = step_stage(FACTORED, stage, log_prob=old, advantages=negative)
    after = step_stage(FACTORED, stage, log_prob=old - 0.25, advantages=negative)

    def share(step: Any, name: str) -> float:
        return step.statistics[f"mask/{name}/masked_sequence_share"].value()

    assert share(before, "staleness") == 0.0  # pi = pi_old: nothing is stale
    assert share(after, "staleness") == 1.0  # 0.25 > 0.2 in every row
    assert 0.0 < share(before, "mismatch") == share(after, "mismatch") < 1.0
    assert before.keep.any()
    assert not after.keep.any()
