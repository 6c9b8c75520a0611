"""Masks by token, by divergence and by the batch, and stacks of them: by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.correction import BatchConstants, batch_constants, rollout_stage
from tests.support.corrections import M2PO, band, kept, opsm, run, spec, tensor, values

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
