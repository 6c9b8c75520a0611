"""Log-ratios: three policies, three ratios, and nothing of a padded position in any of them."""

from __future__ import annotations

import math

import pytest
import torch

from recipe.offpolicy.correction.ratios import (
    compute_divergence,
    compute_excess,
)
from tests.support.corrections import opsm, run, spec, tensor

NAN, INF = math.nan, math.inf


def test_the_clamp_is_at_the_exp_only() -> None:
    """A row of 100 nats against 1 token of -99: the mean counts all of it. Clamped, it would be (20 - 20) / 2."""
    step = run(spec(opsm=opsm(0.4)), mu=[[0.0, 0.0]], old=[[0.0, 0.0]], pi=[[99.0, -100.0]], advantages=-1)
    # (99 - 100) / 2 = -0.5 < -0.4
    assert not step.keep.any()


def test_divergences_of_nearly_equal_policies_keep_their_digits() -> None:
    """k3 = x^2/2 + x^3/6 + ..., where r - 1 - log r written out in float32 gives 0 or 1e-7, for x = +-1e-4 and 1e-6."""
    x = tensor([1e-4, -1e-4, 1e-6])
    exact = [v * v / 2 + v**3 / 6 + v**4 / 24 for v in x.double().tolist()]
    assert compute_divergence("k3", x).tolist() == pytest.approx(exact, rel=1e-8, abs=0.0)
    assert compute_excess(x).tolist() == pytest.approx(
        [v + v * v / 2 + v**3 / 6 for v in x.double().tolist()], rel=1e-12
    )


def test_divergences_are_clamped_at_the_exp_only() -> None:
    """1000 nats: k1 and k2 count all of them; of k3 = r - 1 - log r the ratio is e^20 or e^-20, the log is whole."""
    x = tensor([1000.0, -1000.0])
    assert compute_divergence("k1", x).tolist() == [-1000.0, 1000.0]
    assert compute_divergence("k2", x).tolist() == [500_000.0, 500_000.0]
    assert compute_divergence("k3", x).tolist() == pytest.approx([math.exp(20) - 1001, math.exp(-20) + 999], rel=1e-12)
    assert compute_divergence("tv", x).tolist() == pytest.approx([(math.exp(20) - 1) / 2, 0.5], rel=1e-8)


def test_an_unknown_divergence() -> None:
    with pytest.raises(ValueError, match="one of k1, k2, k3, tv"):
        compute_divergence("k4", torch.zeros(1))
