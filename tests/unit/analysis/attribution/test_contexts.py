"""Log-probs of tokens that several rows sampled after the same tokens, centred."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.recorded_tokens import SampledTokens, center_within_contexts

COUNT = np.arange(4)
MU = np.log([0.5, 0.25, 0.5, 0.125])
SAMPLED = SampledTokens(
    row=COUNT,
    place=0 * COUNT,
    mu=MU,
    old=MU + 0.1,
    pi=MU,
    turn=0 * COUNT,
    index=COUNT,
    step=0 * COUNT,
    staleness=0 * COUNT,
    cluster=np.array([0, 0, 0, 3]),
    # Tokens 5, 6 and 5 again from one context; token 7 alone from another.
    context=np.array([0, 0, 0, 1]),
    token_id=np.array([5, 6, 5, 7]),
    again=0 * COUNT,
)


def test_log_probs_are_centred_where_two_tokens_are_known() -> None:
    count, _, mu, old = center_within_contexts(SAMPLED)
    assert count == 1
    # log 0.5 and log 0.25 are half of log 2 from their mean, under either policy: a constant is gone.
    assert mu.tolist() == pytest.approx([math.log(2) / 2, -math.log(2) / 2])
    assert old.tolist() == pytest.approx(mu.tolist())
