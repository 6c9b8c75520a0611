"""Masks by row: which rows are dropped, by hand, up to the bound itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.corrections import GSM, kept, opsm, run, spec

LOG = math.log


def constant_drift(log_rho: float, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A row whose tokens all have the log-ratio pi_old / mu, to the last bit (mu is 0)."""
    return dict(mu=torch.zeros(1, tokens), old=torch.full((1, tokens), log_rho), dtype=dtype)


# Geometric sequence mask ------------------------------------------------------------------------------------


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
