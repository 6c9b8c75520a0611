"""What is said where no cause shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.attribution_page import (
    compute_kl,
    format_verdict,
    is_healthy,
)
from recipe.offpolicy.analysis.attribution.causes import find_truncation
from recipe.offpolicy.analysis.attribution.recorded_tokens import collect_tokens
from recipe.offpolicy.recording import Rows
from tests.support.attributed import attribute_rows
from tests.support.recordings import drawn_rows

LENGTHS = [20] * 64


def constant(apart: float) -> Rows:
    """log mu about -1 within 0.01 nats, and log pi_old, drawn for itself, ``apart`` above."""
    mu, old = np.random.default_rng(0).normal(-1.0, 0.01, (2, 1280)).astype(np.float32)
    return drawn_rows(LENGTHS, rollout_log_prob=mu, old_log_prob=old + np.float32(apart), log_prob=old)


def test_kl_is_that_of_all_tokens() -> None:
    """Rows of 1 and of 3 tokens, of two ages: log pi_old/mu is 1 in one token and 0 in three, k3(1) = e - 2."""
    mu = np.full(4, -2.0, dtype=np.float32)
    old = mu + np.array([1, 0, 0, 0], dtype=np.float32)
    found = attribute_rows(
        drawn_rows([1, 3], rollout_log_prob=mu, old_log_prob=old, log_prob=old, oldest_version=np.array([0, -1])), {}
    )
    assert compute_kl(found) == pytest.approx((np.e - 2) / 4)


@pytest.mark.parametrize("lengths", [LENGTHS, [3]])
def test_a_large_mismatch_without_a_cause_is_said_to_be_large(lengths: list[int]) -> None:
    """Noise of 0.3 nats, the same at every probability: no cause that is looked for makes it, or can be looked for."""
    found = attribute_rows(drawn_rows(lengths, backend=0.3), {})
    assert "present" not in {cause.verdict for cause in found.causes}
    assert not is_healthy(found)
    assert format_verdict(found).startswith("The mismatch is large and its cause unknown: KL(mu, pi_old) is 0.0")
    assert "steps old" not in format_verdict(found)


def test_where_no_row_is_fresh_age_may_be_why() -> None:
    old = np.full(64, 1)
    assert "weights up to 3 steps old" in format_verdict(
        attribute_rows(drawn_rows(LENGTHS, backend=0.3, step=5, oldest_version=old), {})
    )
    assert "steps old" not in format_verdict(attribute_rows(drawn_rows(LENGTHS, step=5, oldest_version=old), {}))


def test_what_cannot_be_looked_for_is_not_called_even() -> None:
    rows = drawn_rows(LENGTHS)
    copied = attribute_rows(replace(rows, old_log_prob=rows.rollout_log_prob), {})
    assert "mu equals pi_old bit for bit: was one copied from the other?" in format_verdict(copied)
    one_engine = {"correction": {"proximal": "same_engine"}}
    alike = attribute_rows(replace(rows, old_log_prob=rows.rollout_log_prob), one_engine)
    assert "there is nothing to explain, as with correction.proximal=same_engine" in format_verdict(alike)
    assert "5 tokens are recorded" in format_verdict(attribute_rows(drawn_rows([5]), {}))


def test_log_probs_that_are_too_alike() -> None:
    """k3(0.01) is 0.00005 and the correlation 0: neither healthy nor a fault."""
    said = format_verdict(attribute_rows(constant(0.0), {}))
    assert "vary too little to identify" in said
    # An offset of 0.5 is large, and tells no token from another.
    assert format_verdict(attribute_rows(constant(0.5), {})).startswith("The mismatch is large and its cause unknown")


def test_a_missing_mass_is_a_mass() -> None:
    """Noise of 3 nats: pi_old/mu averages e^4.5 = 90 or so, and 1 - 90 is no probability."""
    for cause in find_truncation(collect_tokens(drawn_rows(LENGTHS, backend=3.0)), {}):
        assert cause.verdict == "absent"
        assert "the mean of pi_old/mu" in cause.sentence
        assert "missing" not in cause.evidence
        assert cause.evidence["mean_ratio"] > 2
    for cause in find_truncation(collect_tokens(drawn_rows(LENGTHS, backend=0.1)), {}):
        assert "cut off" in cause.sentence
        assert abs(cause.evidence["missing"]) < 0.05
