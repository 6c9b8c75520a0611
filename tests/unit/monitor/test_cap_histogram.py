"""The ESS of raw weights for any cap equals the metric, is exact at each edge, decreases, and comes from sums that add
up.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as draw

from recipe.offpolicy.correction import CorrectionSpec, Statistic
from recipe.offpolicy.correction.spec import WEIGHT
from recipe.offpolicy.correction.statistics import fetch
from recipe.offpolicy.monitor.moving_bounds import (
    CAPS,
    WEIGHT_SUMS,
    Histogram,
    compute_ess_by_cap,
    defer_histograms,
    find_widest_cap,
    read_histogram,
)
from tests.support.corrections import TIS, spec, tensor
from tests.support.drawn import Rows, batches, decide, examples, weights

TOKENS, TOTAL, SQUARE = WEIGHT_SUMS


def shown(correction: CorrectionSpec, rows: Rows) -> dict[str, Statistic]:
    """What a worker measures about the weight."""
    reading = defer_histograms(
        correction,
        {WEIGHT: "upper"},
        old_log_prob=rows.old,
        rollout_log_prob=rows.mu,
        log_prob=rows.pi,
        response_mask=rows.mask,
        advantages=rows.advantages,
        segment_ids=rows.turns,
        versions=rows.versions,
    )
    return dict(fetch([reading])[0])


def rows_of(log_rho: list[list[float]], drift: float = 0.0, mask: Any = None) -> Rows:
    """Rows with these log-ratios of pi_old and mu, in float64; pi is ``drift`` nats above pi_old."""
    mu = tensor([[-8.0] * len(row) for row in log_rho], torch.float64)
    old = mu + tensor(log_rho, torch.float64)
    there = torch.ones_like(mu, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    ones = torch.ones_like(mu)
    return Rows(mu, old, old + drift, there, ones, ones.long(), ones.long())


def sums_of(values: dict[str, Any] | None, log_rho: list[list[float]], **given_: Any) -> Histogram:
    sums = read_histogram(shown(spec(weight=values or TIS), rows_of(log_rho, **given_)), WEIGHT)
    assert sums is not None
    return sums


def test_the_cap_of_four_tokens_by_hand() -> None:
    """Weights 1, 1, 1 and 3. With a cap c in [1, 3], the ESS is (3 + c)^2 / (4 (3 + c^2)); it is 0.9 at c = 1.95325,
    the greater root of 2.6 c^2 - 6 c + 1.8, and 0.75 without a cap.
    """
    sums = sums_of(None, [[0.0, 0.0, 0.0, math.log(3.0)]])
    goal = find_widest_cap(sums, 0.9)
    assert goal <= math.log(1.953254) < goal * 10 ** (1 / 64)
    assert goal in CAPS
    assert compute_ess_by_cap(sums)[-1] == pytest.approx(0.75)
    assert find_widest_cap(sums, 0.75) == math.inf
    assert find_widest_cap(sums, 0.7) == math.inf
    # At c = 1 all are alike: only just above it, at the first edges, is the ESS above 1 - 1e-6.
    assert 0 < find_widest_cap(sums, 1 - 1e-6) < 0.01


def capped() -> Any:
    """Weights with one cap that may follow an ESS."""
    return weights().filter(
        lambda one: one and one["kind"] != "reject" and one["upper"] is not None and one["by_position"] is None
    )


@examples
@given(batch=batches(), values=capped(), place=draw.integers(0, len(CAPS) - 1))
def test_the_ess_under_another_cap_is_the_metric_of_a_run_with_that_cap(
    batch: Rows, values: dict[str, Any], place: int
) -> None:
    assume(batch.mask.any())
    sums = read_histogram(shown(spec(weight=values), batch), WEIGHT)
    other = spec(weight=values | {"upper": math.exp(CAPS[place])})
    assert compute_ess_by_cap(sums)[place] == pytest.approx(
        decide(other, batch).statistics["weight/ess"].value(), rel=1e-5
    )
