"""Log-ratios: three policies, three ratios, and nothing of a padded position in any of them."""

from __future__ import annotations

import math

import pytest

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
