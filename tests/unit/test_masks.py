"""Masks: which rows and tokens are dropped, by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from corrections import GSM, M2PO, TIS, band, opsm, run, spec, tensor, values

from recipe.offpolicy.correction import BatchConstants, CorrectionSpec, batch_constants, rollout_stage, step_stage

LOG = math.log


def kept(step: Any) -> list[bool]:
    """Whether each row is kept; its tokens must agree."""
    assert (step.keep == step.keep[:, :1]).all()
    return step.keep[:, 0].tolist()


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


def random_rows(rows: int = 64, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(size: float) -> torch.Tensor:
        return size * torch.randn(rows, tokens, generator=generator)

    mu = -2.0 + normal(0.5)
    old = mu + normal(0.3)
    mask = torch.rand(rows, tokens, generator=generator) < 0.8
    return mu, old, old + normal(0.3), mask


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


# By token ---------------------------------------------------------------------------------------------------


def test_icepop() -> None:
    """rho = 0.49, 0.5, 1, 2 and 2.01 in [0.5, 2]: tokens outside lose their gradient, their row stays."""
    icepop = band(0.5, 2.0, level="token")
    rows = dict(mu=[[0.0] * 5], old=[[LOG(0.49), LOG(0.5), 0.0, LOG(2.0), LOG(2.01)]])
    for aggregate in ("geometric", "product", "any"):
        step = run(spec(m=icepop | {"aggregate": aggregate}), **rows)
        assert step.keep.tolist() == [[False, True, True, True, False]]
    assert values(step)["mask/m/masked_token_share"] == pytest.approx(2 / 5)
    assert values(step)["mask/m/masked_sequence_share"] == 0.0


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        (1e-4, 100.0, [True, False, False, True]),
        (1e-4, None, [True, False, True, True]),
        (None, 100.0, [True, True, False, True]),
    ],
)
def test_outliers(lower: float | None, upper: float | None, expected: list[bool]) -> None:
    """One token at rho = 1e-5, or at 101, drops its row; either side may be open. The last row's is a tool token."""
    outlier = band(lower, upper, aggregate="any")
    old = [[0.0, 0.1, -0.1], [0.0, LOG(1e-5), 0.0], [0.0, 0.0, LOG(101.0)], [0.0, LOG(1e-5), 0.0]]
    step = run(spec(m=outlier), mu=torch.zeros(4, 3), old=old, mask=[[1, 1, 1]] * 3 + [[1, 0, 1]])
    assert step.keep.any(-1).tolist() == expected
    assert torch.equal(step.keep, step.keep[:, :1] & torch.tensor([[1, 1, 1]] * 3 + [[1, 0, 1]]).bool())


@pytest.mark.parametrize("tokens", [1146, 5000])
def test_the_outlier_mask_drops_what_the_geometric_mask_lets_through(tokens: int) -> None:
    old = torch.zeros(2, tokens)
    old[0, 500] = LOG(1e-5)
    old[1, :2] = tensor([LOG(1e5), LOG(1e-5)])
    rows = dict(mu=torch.zeros(2, tokens), old=old)
    assert kept(run(spec(gsm=GSM), **rows)) == [True, True]
    assert kept(run(spec(outlier=band(1e-4, 100.0, aggregate="any")), **rows)) == [False, False]


@pytest.mark.parametrize("aggregate", ["product", "geometric", "any"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_single_ratio_at_its_bound(level: str, aggregate: str) -> None:
    at = np.float32(LOG(2.0))
    beyond = np.nextafter(at, np.float32(1))
    mask = spec(m=band(0.5, 2.0, level=level, aggregate=aggregate))
    for sign in (1, -1):
        assert kept(run(mask, mu=[[0.0]], old=[[sign * float(at)]])) == [True]
        assert kept(run(mask, mu=[[0.0]], old=[[sign * float(beyond)]])) == [False]


# Divergences ------------------------------------------------------------------------------------------------

LN2 = LOG(2.0)
DIVERGENCES = {
    # Of log r = ln 2, -ln 2 and 0, that is r = 2, 1/2 and 1: sum, mean and greatest.
    "k1": (0.0, 0.0, LN2),  # -ln 2 + ln 2
    "k2": (LN2**2, LN2**2 / 3, LN2**2 / 2),
    "k3": (0.5, 0.5 / 3, 1 - LN2),  # (1 - ln 2) + (ln 2 - 1/2), where 1 - ln 2 = 0.307 > 0.193
    "tv": (0.75, 0.25, 0.5),  # 1/2 and 1/4
}


@pytest.mark.parametrize("ratio", ["rollout", "full", "ppo"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "tv"])
def test_divergences_by_hand(kind: str, reduction: str, ratio: str) -> None:
    """Just above and just below the worked value; a tool token and padding count nowhere."""
    value = DIVERGENCES[kind][("sum", "mean", "max").index(reduction)]
    drift = [LN2, -LN2, 9.0, 0.0, 9.0]
    zeros = [0.0] * 5
    policies = {
        "rollout": dict(mu=[zeros], old=[drift], pi=[zeros]),
        "full": dict(mu=[zeros], old=[[5.0] * 5], pi=[drift]),
        "ppo": dict(mu=[[5.0] * 5], old=[zeros], pi=[drift]),
    }[ratio]
    for upper, expected in ((value + 1e-5, True), (value - 1e-5, False)):
        if upper >= 0 or kind == "k1":
            mask = band(None, upper, aggregate=f"{kind}_{reduction}", ratio=ratio)
            assert bool(run(spec(m=mask), **policies, mask=[[1, 1, 0, 1, 0]]).keep.any()) == expected
    for lower, expected in ((value - 1e-5, True), (value + 1e-5, False)):
        if lower >= 0 or kind == "k1":
            mask = band(lower, None, aggregate=f"{kind}_{reduction}", ratio=ratio)
            assert bool(run(spec(m=mask), **policies, mask=[[1, 1, 0, 1, 0]]).keep.any()) == expected


def test_k1_is_signed_and_inverts_the_ratio() -> None:
    """k1 = -log r, so that a band [lower, upper] on it is [exp(-upper), exp(-lower)] on the ratio."""
    old = torch.linspace(-0.3, 0.3, 61)[:, None]
    rows = dict(mu=torch.zeros(61, 1), old=old)
    by_k1 = run(spec(m=band(-0.1001, 0.2001, aggregate="k1_mean")), **rows)
    by_ratio = run(spec(m=band(math.exp(-0.2001), math.exp(0.1001))), **rows)
    assert torch.equal(by_k1.keep, by_ratio.keep)
    assert by_k1.keep.sum() == 31  # -0.20 to 0.10 in steps of 0.01


@pytest.mark.parametrize("kind", ["k2", "k3", "tv"])
def test_a_divergence_at_its_bound(kind: str) -> None:
    """Exact in every dtype: (1/2)^2 / 2 = 1/8. Of the others, the value that the ratio e^0.5 gives in float32."""
    value = {"k2": 0.125, "k3": math.exp(0.5) - 1.5, "tv": (math.exp(0.5) - 1) / 2}[kind]
    at = float(np.float32(value))
    for upper, expected in ((at, True), (float(np.nextafter(np.float32(at), np.float32(0))), False)):
        mask = band(None, upper, aggregate=f"{kind}_mean")
        assert kept(run(spec(m=mask), mu=[[0.0, 0.0]], old=[[0.5, 0.5]])) == [expected]


# Difference of probabilities --------------------------------------------------------------------------------


def test_dppo() -> None:
    """p_pi - p_mu beyond +-0.2 where the advantage pushes further: down and A < 0, or up and A > 0.

    Tokens of p_mu = 0.5: p_pi = 0.25 (-0.25), 0.75 (+0.25), 0.35 (-0.15); in rows of A < 0, A > 0 and A = 0.
    """
    down = band(-0.2, None, aggregate="binary_tv", level="token", ratio="full", when="negative")
    up = band(None, 0.2, aggregate="binary_tv", level="token", ratio="full", when="positive")
    half = torch.full((3, 3), LOG(0.5))
    pi = tensor([[LOG(0.25), LOG(0.75), LOG(0.35)]]).expand(3, 3)
    step = run(spec(down=down, up=up), mu=half, old=half, pi=pi, advantages=[-1.0, 1.0, 0.0])
    assert step.keep.tolist() == [[False, True, True], [True, False, True], [True, True, True]]


def test_a_difference_of_probabilities_is_not_of_ratios() -> None:
    """p = 0.001 for 0.0001 is ten times as much and a difference of 0.0009; 0.9 for 0.6 is 1.5 times and 0.3."""
    rows = dict(mu=[[LOG(0.0001), LOG(0.6)]], old=[[LOG(0.001), LOG(0.9)]])
    step = run(spec(m=band(-0.2, 0.2, aggregate="binary_tv", level="token")), **rows)
    assert step.keep.tolist() == [[True, False]]
    step = run(spec(m=band(0.5, 2.0, level="token")), **rows)
    assert step.keep.tolist() == [[False, True]]
    assert not run(spec(m=band(-0.2, 0.2, aggregate="binary_tv")), **rows).keep.any()  # any token drops the row


@pytest.mark.parametrize(
    ("ratio", "numerator", "denominator"), [("rollout", "old", "mu"), ("full", "pi", "mu"), ("ppo", "pi", "old")]
)
def test_which_two_probabilities(ratio: str, numerator: str, denominator: str) -> None:
    """0.75 - 0.25 = 0.5 at the bound; the third policy's probability is out of it."""
    rows = {name: [[LOG(0.99)]] for name in ("mu", "old", "pi")}
    rows |= {numerator: [[LOG(0.75)]], denominator: [[LOG(0.25)]]}
    for bounds, expected in (((None, 0.51), True), ((None, 0.49), False), ((0.49, None), True), ((0.51, None), False)):
        assert kept(run(spec(m=band(*bounds, aggregate="binary_tv", ratio=ratio)), **rows)) == [expected]


def test_a_difference_of_probabilities_at_its_bound() -> None:
    # p = 1 and p = 0 to the last bit: the difference is exactly 1, the bound 1 holds it and the next number below not.
    rows = dict(mu=[[-200.0]], old=[[0.0]])
    below = float(np.nextafter(np.float32(1), np.float32(0)))
    assert kept(run(spec(m=band(-0.5, 1.0, aggregate="binary_tv")), **rows)) == [True]
    assert kept(run(spec(m=band(-0.5, below, aggregate="binary_tv")), **rows)) == [False]


# Whose advantage --------------------------------------------------------------------------------------------


def test_the_sign_of_the_row_or_of_the_token() -> None:
    """Advantages (3, -1, 0) of mean 2/3 > 0, and (-3, 1, 0) of mean -2/3 < 0; all tokens are far below mu."""
    rows: dict[str, Any] = dict(mu=torch.zeros(2, 3), old=torch.zeros(2, 3), pi=torch.full((2, 3), -1.0))
    rows["advantages"] = [[3.0, -1.0, 0.0], [-3.0, 1.0, 0.0]]
    by_row = run(spec(m=opsm(0.1)), **rows)
    assert by_row.keep.tolist() == [[True] * 3, [False] * 3]
    by_token = run(spec(m=opsm(0.1, sign="token")), **rows)
    assert by_token.keep.tolist() == [[True, False, True], [False, True, True]]
    positive = band(None, 1.5, ratio="full", sign="token", when="positive")
    above = run(spec(m=positive), **rows | {"pi": torch.ones(2, 3)})
    assert above.keep.tolist() == [[False, True, True], [True, False, True]]


def test_the_sign_of_the_token_leaves_the_statistic_to_the_row() -> None:
    """mean log(mu/pi) = (1 - 0.1) / 2 = 0.45 > 0.4: the second token goes although it is above mu itself."""
    rows = dict(mu=[[0.0, 0.0]], old=[[0.0, 0.0]], pi=[[-1.0, 0.1]], advantages=[[1.0, -1.0]])
    assert run(spec(m=opsm(0.4, sign="token")), **rows).keep.tolist() == [[True, False]]
    assert run(spec(m=opsm(0.5, sign="token")), **rows).keep.tolist() == [[True, True]]
    by_token = opsm(0.4, sign="token", level="token")
    assert run(spec(m=by_token), **rows).keep.tolist() == [[True, True]]
    assert run(spec(m=by_token), **rows | {"advantages": [[-1.0, -1.0]]}).keep.tolist() == [[False, True]]


def test_a_tool_tokens_advantage_is_nobodys() -> None:
    rows = dict(mu=[[0.0] * 3], old=[[0.0] * 3], pi=[[-1.0] * 3], advantages=[[-9.0, 1.0, 1.0]], mask=[[0, 1, 1]])
    for sign in ("row", "token"):
        assert run(spec(m=opsm(0.1, sign=sign)), **rows).keep.tolist() == [[False, True, True]]


def test_bounds_for_each_sign_of_the_advantage() -> None:
    """Two masks: a tight band where the advantage is negative, a wide one where it is positive; 0 passes both."""
    tight, wide = band(0.99, 1.01, when="negative"), band(0.9, 1.1, when="positive")
    ratios = [0.95, 1.005, 1.05, 1.2]
    rows = dict(mu=torch.zeros(12, 1), old=[[LOG(r)] for r in ratios * 3])
    step = run(spec(tight=tight, wide=wide), **rows, advantages=[-1.0] * 4 + [1.0] * 4 + [0.0] * 4)
    assert kept(step) == [False, True, False, False] + [True, True, True, False] + [True] * 4


# Second moment ----------------------------------------------------------------------------------------------


def budget_of(budget: float, rows: list[list[float]], mask: Any = None) -> list[list[bool]]:
    m2po = spec(m=M2PO | {"budget": budget})
    return run(m2po, mu=torch.zeros_like(tensor(rows)), old=rows, mask=mask).keep.tolist()


def test_m2po_by_hand() -> None:
    """Squares 0.01, 0.04, 0.09 and 0.25 over two rows: means of the first 1 to 4 are 0.01, 0.025, 0.0467, 0.0975."""
    rows = [[0.1, -0.5], [-0.2, 0.3]]
    assert budget_of(0.1, rows) == [[True, True], [True, True]]
    assert budget_of(0.09, rows) == [[True, False], [True, True]]
    assert budget_of(0.045, rows) == [[True, False], [True, False]]
    assert budget_of(0.02, rows) == [[True, False], [False, False]]
    assert budget_of(0.005, rows) == [[False, False], [False, False]]


def test_m2po_keeps_a_mean_at_its_budget() -> None:
    """Squares 0, 1/4 and 1: the mean of the first two is 1/8 exactly."""
    rows = [[0.0, 0.5, -1.0]]
    assert budget_of(0.125, rows) == [[True, True, False]]
    assert budget_of(0.1249, rows) == [[True, False, False]]


def test_m2po_drops_equals_together() -> None:
    """Squares 0, 1/4 and 1/4: one of them alone would leave 1/8 in a budget of 0.15, both leave 1/6."""
    assert budget_of(0.15, [[0.0, 0.5, -0.5]]) == [[True, False, False]]
    assert budget_of(0.17, [[0.0, 0.5, -0.5]]) == [[True, True, True]]
    assert budget_of(0.25, [[0.5, -0.5], [0.5, 0.5]]) == [[True, True], [True, True]]
    assert budget_of(0.24, [[0.5, -0.5], [0.5, 0.5]]) == [[False, False], [False, False]]


def test_m2po_counts_valid_tokens_only() -> None:
    """Without the tool token of 3 nats, and without it alone, the mean is (0.01 + 0.04) / 2 = 0.025."""
    rows, mask = [[0.1, 3.0, 0.2]], [[1, 0, 1]]
    assert budget_of(0.026, rows, mask) == [[True, False, True]]
    assert budget_of(0.024, rows, mask) == [[True, False, False]]
    assert budget_of(0.026, rows) == [[True, False, True]]


def test_m2po_without_a_token() -> None:
    assert budget_of(0.04, [[1.0, 1.0]], [[0, 0]]) == [[False, False]]


def test_m2po_is_of_the_batch_and_not_of_the_row() -> None:
    """Squares 0.01 and 0.16: alone the second row exceeds 0.1, together the mean is 0.085."""
    assert budget_of(0.1, [[0.1], [0.4]]) == [[True], [True]]
    assert budget_of(0.1, [[0.4]]) == [[False]]


def test_m2po_by_the_constants_of_the_batch() -> None:
    """The same rows in micro-batches of one: kept, for the batch's cut is infinite."""
    m2po, zero = spec(m=M2PO | {"budget": 0.1}), torch.zeros(1, 1)
    old = tensor([[0.1], [0.4]])
    whole = batch_constants(m2po, old_log_prob=old, rollout_log_prob=old * 0, response_mask=old > 0)
    assert whole.cutoffs == {"m": math.inf}
    for row in (old[:1], old[1:]):
        stage = rollout_stage(m2po, old_log_prob=row, rollout_log_prob=zero, response_mask=zero + 1, constants=whole)
        assert stage.keep.all()


def test_m2po_without_its_constants() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="batch_constants"):
        rollout_stage(
            spec(m=M2PO),
            old_log_prob=one,
            rollout_log_prob=one,
            response_mask=one,
            constants=BatchConstants(),
        )


# Stacks -----------------------------------------------------------------------------------------------------


def test_all_masks_must_keep() -> None:
    """Rows: inside both; outside GSM only (0.02 > 0.00995); outside OPSM only; outside both; and A > 0."""
    correction = spec(TIS, gsm=GSM, opsm=opsm(0.1))
    mu = torch.zeros(5, 2)
    old = tensor([[0.0], [0.02], [0.0], [0.02], [0.0]]).expand(5, 2)
    pi = tensor([[0.0], [0.0], [-0.2], [-0.2], [-0.2]]).expand(5, 2)
    step = run(correction, mu=mu, old=old, pi=pi, advantages=[-1.0, -1, -1, -1, 1])
    assert kept(step) == [True, False, False, False, True]
    result = values(step)
    # Each mask looks at every row: 2 of 5 and 2 of 5, together 3 of 5.
    assert result["mask/gsm/masked_sequence_share"] == pytest.approx(2 / 5)
    assert result["mask/opsm/masked_sequence_share"] == pytest.approx(2 / 5)
    assert result["keep/sequence_share"] == pytest.approx(2 / 5)
    assert result["keep/token_mask_ratio"] == pytest.approx(3 / 5)
    # The weight is the token's own, also in rows that are dropped: e^0.02 = 1.0202.
    assert step.weight[:, 0].tolist() == pytest.approx([1.0, 1.0202013, 1.0, 1.0202013, 1.0], abs=1e-6)


def test_a_stack_is_the_intersection_of_its_masks() -> None:
    mu, old, pi, mask = random_rows()
    masks = {"gsm": GSM, "opsm": opsm(0.05), "tail": band(0.5, 2.0, aggregate="product", ratio="ppo")}
    rows = dict(mu=mu, old=old, pi=pi, mask=mask, advantages=torch.linspace(-1, 1, 64))
    together = run(spec(TIS, **masks), **rows)
    alone = [run(spec(**{name: one}), **rows) for name, one in masks.items()]
    assert torch.equal(together.keep, alone[0].keep & alone[1].keep & alone[2].keep)
    assert 0 < together.keep.sum() < mask.sum()
    assert torch.equal(together.weight, run(spec(TIS), **rows).weight)


def test_the_order_of_masks_does_not_matter() -> None:
    mu, old, pi, mask = random_rows()
    rows = dict(mu=mu, old=old, pi=pi, mask=mask, advantages=-1)
    pairs = spec(a=GSM, b=opsm(0.05)).masks
    one, two = (run(CorrectionSpec(masks=order), **rows) for order in (pairs, pairs[::-1]))
    assert torch.equal(one.keep, two.keep)
    assert values(one) == pytest.approx(values(two), nan_ok=True)
