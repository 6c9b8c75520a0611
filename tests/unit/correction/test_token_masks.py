"""Masks by token, by divergence and by the batch, and stacks of them: by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw

from recipe.offpolicy.correction import BatchConstants, CorrectionSpec, batch_constants, rollout_stage
from recipe.offpolicy.correction.masks import compute_second_moment_cutoff
from tests.support.corrections import GSM, M2PO, TIS, band, kept, opsm, random_rows, run, spec, tensor, values
from tests.support.growth import count_work

LOG = math.log


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


@given(draw.lists(draw.integers(0, 64), min_size=1, max_size=30), draw.sampled_from([1 / 64, 1 / 32, 0.5, 1.0, 4.0]))
def test_the_cutoff_of_m2po_is_that_of_all_squares_in_order(sixteenths: list[int], budget: float) -> None:
    """By the definition: the greatest square up to which the mean of all of them is at most the budget."""
    squares = sorted((number / 16) ** 2 for number in sixteenths)
    means = {top: sum(up_to := [s for s in squares if s <= top]) / len(up_to) for top in squares}
    admissible = [top for top in squares if means[top] <= budget]
    expected = -1.0 if not admissible else math.inf if admissible[-1] == squares[-1] else admissible[-1]
    log_ratio = torch.tensor(sixteenths, dtype=torch.float64) / 16
    assert compute_second_moment_cutoff(budget, log_ratio) == expected


def test_only_squares_beyond_the_budget_of_m2po_are_sorted() -> None:
    log_ratio = torch.zeros(1000, dtype=torch.float64)
    log_ratio[:3] = torch.tensor([1.0, 2.0, 40.0])
    work = count_work(lambda: compute_second_moment_cutoff(0.04, log_ratio))
    assert work.elements["sort"] == 2 * 3  # values, and where each was
