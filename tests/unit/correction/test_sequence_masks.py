"""Masks by row: which rows are dropped, by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipe.offpolicy.correction import rollout_stage
from tests.support.corrections import GSM, kept, opsm, random_rows, run, spec, values

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("bound", [0.99, 1.01])
def test_gsm_keeps_the_bound_and_drops_the_next_number(bound: float, tokens: int, dtype: torch.dtype) -> None:
    """Inclusive: the float32 log of the bound is inside, one float32 step away from 0 is outside."""
    at = np.float32(LOG(bound))
    beyond = np.nextafter(at, np.float32(math.copysign(1.0, at)))
    assert kept(run(spec(gsm=GSM), **constant_drift(float(at), tokens, dtype))) == [True]
    assert kept(run(spec(gsm=GSM), **constant_drift(float(beyond), tokens, dtype))) == [False]


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


def test_opsm_compares_pi_with_mu_not_with_pi_old() -> None:
    """pi = pi_old, both 0.2 below mu: dropped by the full ratio, kept by pi / pi_old."""
    rows = dict(mu=[[0.0]], old=[[-0.2]], pi=[[-0.2]], advantages=-1)
    assert kept(run(spec(m=opsm(0.1)), **rows)) == [False]
    assert kept(run(spec(m=opsm(0.1, "ppo")), **rows)) == [True]
    assert kept(run(spec(m=opsm(0.1, "rollout")), **rows)) == [False]


# Factored OPSM ----------------------------------------------------------------------------------------------

FACTORED = spec(mismatch=opsm(0.1, "rollout"), staleness=opsm(0.2, "ppo"))


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
