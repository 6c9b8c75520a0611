"""Masks, weights, units and pi_old by hand, including values at the bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec, proximal_log_prob, rollout_stage
from recipe.offpolicy.correction.ratios import compute_divergence, compute_excess
from recipe.offpolicy.correction.units import partition_units
from tests.support.corrections import GSM, M2PO, TIS, band, kept, opsm, run, spec, tensor, values
from tests.support.refusals import mask

LOG = math.log


def constant_drift(log_rho: float, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A row in which every token's log-ratio pi_old / mu is bitwise the same (mu is 0)."""
    return dict(mu=torch.zeros(1, tokens), old=torch.full((1, tokens), log_rho), dtype=dtype)


# Geometric sequence mask ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("bound", [0.99, 1.01])
def test_gsm_keeps_the_bound_and_drops_the_next_number(bound: float, tokens: int, dtype: torch.dtype) -> None:
    """Bounds are inclusive: the float32 log of the bound is inside, and the next float32 away from 0 is outside."""
    at = np.float32(LOG(bound))
    beyond = np.nextafter(at, np.float32(math.copysign(1.0, at)))
    assert kept(run(spec(gsm=GSM), **constant_drift(float(at), tokens, dtype))) == [True]
    assert kept(run(spec(gsm=GSM), **constant_drift(float(beyond), tokens, dtype))) == [False]


# Off-policy sequence masking --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [0.125, 0.5])
def test_opsm_keeps_exactly_delta(delta: float, dtype: torch.dtype, tokens: int) -> None:
    """The comparison is a strict >: mean log(mu/pi) = delta is kept, and 2^-10 more is dropped (all are exact in each
    dtype).
    """
    zeros = torch.zeros(1, tokens)
    at = dict(mu=zeros, old=zeros, dtype=dtype, advantages=-1)
    step = 2.0**-10 if dtype is not torch.bfloat16 else 2.0**-8
    assert kept(run(spec(opsm=opsm(delta)), pi=torch.full((1, tokens), -delta), **at)) == [True]
    assert kept(run(spec(opsm=opsm(delta)), pi=torch.full((1, tokens), -delta - step), **at)) == [False]


# Divergences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k2", "k3", "tv"])
def test_a_divergence_at_its_bound(kind: str) -> None:
    """(1/2)^2 / 2 = 1/8 is exact in every dtype. For the others, the bound is the value that the ratio e^0.5 gives in
    float32.
    """
    value = {"k2": 0.125, "k3": math.exp(0.5) - 1.5, "tv": (math.exp(0.5) - 1) / 2}[kind]
    at = float(np.float32(value))
    for upper, expected in ((at, True), (float(np.nextafter(np.float32(at), np.float32(0))), False)):
        mask = band(None, upper, aggregate=f"{kind}_mean")
        assert kept(run(spec(m=mask), mu=[[0.0, 0.0]], old=[[0.5, 0.5]])) == [expected]


# Second moment ----------------------------------------------------------------------------------------------


def budget_of(budget: float, rows: list[list[float]], mask: Any = None) -> list[list[bool]]:
    m2po = spec(m=M2PO | {"budget": budget})
    return run(m2po, mu=torch.zeros_like(tensor(rows)), old=rows, mask=mask).keep.tolist()


def test_m2po_drops_equals_together() -> None:
    """Squares 0, 1/4 and 1/4: one of the two alone would leave 1/8 with a budget of 0.15, both together leave 1/6."""
    assert budget_of(0.15, [[0.0, 0.5, -0.5]]) == [[True, False, False]]
    assert budget_of(0.17, [[0.0, 0.5, -0.5]]) == [[True, True, True]]
    assert budget_of(0.25, [[0.5, -0.5], [0.5, 0.5]]) == [[True, True], [True, True]]
    assert budget_of(0.24, [[0.5, -0.5], [0.5, 0.5]]) == [[False, False], [False, False]]


NEGATIVE, POSITIVE = TIS | {"when": "negative"}, TIS | {"when": "positive", "upper": 4.0}


def by_sign(**weights: dict[str, Any]) -> CorrectionSpec:
    return CorrectionSpec.from_mapping({"weights": weights})


def test_a_weight_after_a_tools_result_alone() -> None:
    """rho = 8 everywhere: the weight is 1 before the tool's token, min(8, 2) after it, and all tokens are kept."""
    mask, turns = [[1, 0, 1, 1], [1, 1, 1, 1]], [[0, 0, 1, 1], [0, 0, 0, 0]]
    weights = by_sign(a=TIS | {"when": "post_tool"})
    step = run(weights, mu=torch.zeros(2, 4), old=[[LOG(8)] * 4] * 2, mask=mask, turns=turns)
    torch.testing.assert_close(step.weight, torch.tensor([[1.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    with pytest.raises(ValueError, match=r"when=post_tool needs segment_ids"):
        run(weights, mu=torch.zeros(2, 4), old=[[LOG(8)] * 4] * 2)


STALE: dict[str, Any] = {"aggregate": "staleness", "level": "token", "upper": 4}
ONE = torch.ones(1, 1)


def test_ages_that_are_not_known_are_not_guessed() -> None:
    for correction in (spec(stale=STALE), spec(TIS | {"by_staleness": [1.0, 2.0]})):
        with pytest.raises(ValueError, match="the age of the weights is needed but unknown"):
            rollout_stage(correction, old_log_prob=ONE, rollout_log_prob=ONE, response_mask=ONE)


NAN, INF = math.nan, math.inf


def test_the_clamp_is_at_the_exp_only() -> None:
    """A row with one token of 100 nats and one of -99: the mean includes all of it. Clamped, the mean would be (20 -
    20) / 2.
    """
    step = run(spec(opsm=opsm(0.4)), mu=[[0.0, 0.0]], old=[[0.0, 0.0]], pi=[[99.0, -100.0]], advantages=-1)
    # (99 - 100) / 2 = -0.5 < -0.4
    assert not step.keep.any()


def test_divergences_of_nearly_equal_policies_keep_their_digits() -> None:
    """k3 = x^2/2 + x^3/6 + ...; r - 1 - log r, computed in float32, would be 0 or 1e-7 for x = +-1e-4 and 1e-6."""
    x = tensor([1e-4, -1e-4, 1e-6])
    exact = [v * v / 2 + v**3 / 6 + v**4 / 24 for v in x.double().tolist()]
    assert compute_divergence("k3", x).tolist() == pytest.approx(exact, rel=1e-8, abs=0.0)
    assert compute_excess(x).tolist() == pytest.approx(
        [v + v * v / 2 + v**3 / 6 for v in x.double().tolist()], rel=1e-12
    )


# A partition of the valid tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_ids_of_any_integer_type_and_size(dtype: torch.dtype) -> None:
    """The least and greatest number of the type are ordinary ids, and so is the id on padding."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[high, low, high, 0, low]], dtype=dtype)
    valid = torch.tensor([[True, True, False, True, True]])
    unit = partition_units("version", valid, ids)
    total = unit.total(tensor([[1.0, 10.0, 0.0, 100.0, 1000.0]]))
    assert total[unit.tokens > 0].tolist() == [1010.0, 100.0, 1.0]


# Turns from the response mask -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correction", "reads"),
    [
        ({}, False),
        ({"proximal": "reuse"}, False),
        ({"kl_clip": {"lower": 0.8, "upper": 1.2}}, False),
        (mask(ratio="ppo"), False),
        ({"masks": {"stale": {"aggregate": "staleness", "level": "token", "upper": 4}}}, False),
        (mask(), True),
        (mask(ratio="full"), True),
        ({"proximal": "bypass"}, True),
        ({"proximal": "same_engine"}, True),
        ({"proximal": "loglinear", "alpha": 0.5}, True),
    ],
)
def test_tokens_without_mu_keep_their_gradient_where_mu_is_not_read(correction: dict[str, Any], reads: bool) -> None:
    """mu is NaN on the first token, and pi_old on the last."""
    spec = CorrectionSpec.from_mapping(correction)
    assert spec.reads_mu == reads
    if "stale" not in dict(spec.masks):
        step = run(spec, mu=[[math.nan, 0.0, 0.0]], old=[[0.0, 0.0, math.nan]])
        assert step.keep.tolist() == [[not reads, True, False]]
        assert step.weight.tolist() == [[float(not reads), 1.0, 0.0]]
        assert values(step)["nonfinite/rollout_log_prob"] == 1


MU, OLD, PI = tensor([[-1.0, -2.0]]), tensor([[-1.5, -2.25]]), tensor([[-2.0, -1.0]])


def test_the_share_by_age_is_that_of_areal() -> None:
    """In AReaL's code, v_theta is the current version and v_prox = v_theta - 1: (v_prox - v_mu) / (v_theta - v_mu) = (a
    - 1) / a.

    From log mu = -1 to log pi = -2, and from -2 to -1.
    """
    policies = dict(old_log_prob=OLD, rollout_log_prob=MU, log_prob=PI)
    by_token = proximal_log_prob("loglinear", "by_age", ages=torch.tensor([[2, 4]]), **policies)
    assert by_token.tolist() == [[-1.5, -1.25]]
    line = dict(old_log_prob=OLD, rollout_log_prob=torch.zeros(1, 5), log_prob=torch.ones(1, 5))
    shares = proximal_log_prob("loglinear", "by_age", ages=torch.arange(5)[None], **line)
    assert shares[0].tolist() == pytest.approx([0, 0, 1 / 2, 2 / 3, 3 / 4])
    for age in (0, 1):
        assert torch.equal(proximal_log_prob("loglinear", "by_age", ages=torch.tensor([age]), **policies), MU)
    with pytest.raises(ValueError, match="the batch does not contain the versions"):
        proximal_log_prob("loglinear", "by_age", **policies)


def test_a_part_picks_tokens_by_turn_direction_or_their_own_sign() -> None:
    choices = {("any", "row"): False, ("negative", "row"): False, ("negative", "token"): True}
    choices |= {("outward", "row"): True, ("post_tool", "row"): True}
    for (when, sign), picks in choices.items():
        (part,) = (each for _, each in spec(None, m=band(0.5, 2.0, when=when, sign=sign)).masks)
        assert part.picks_tokens == picks, (when, sign)
