"""Tokens that several rows sampled after the same tokens, and statistics of sums with their intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.attribution.causes.sampled_tokens import (
    SampledTokens,
    center_within_contexts,
    collect_tokens,
    estimate,
    sum_by_cluster,
    sum_probabilities,
)
from recipe.offpolicy.analysis.attribution.frames import ValidTokens
from tests.support.recordings import drawn_rows

COUNT = np.arange(4)
MU = np.log([0.5, 0.25, 0.5, 0.125])
SAMPLED = SampledTokens(
    tokens=ValidTokens(row=COUNT, place=0 * COUNT, mu=MU, old=MU + 0.1, pi=MU, turn=0 * COUNT, index=COUNT),
    step=0 * COUNT,
    staleness=0 * COUNT,
    cluster=np.array([0, 0, 0, 3]),
    # Tokens 5, 6 and 5 again from one context; token 7 alone from another.
    context=np.array([0, 0, 0, 1]),
    token_id=np.array([5, 6, 5, 7]),
    again=0 * COUNT,
    turns=1,
)


def test_a_token_counts_once_in_its_context() -> None:
    found = sum_probabilities(SAMPLED)
    assert found.mu.tolist() == pytest.approx([0.75, 0.125])
    assert found.old.tolist() == pytest.approx([0.75 * math.exp(0.1), 0.125 * math.exp(0.1)])
    assert found.cluster.tolist() == [0, 3]


def test_tokens_of_two_versions_have_no_context_in_common() -> None:
    """Three rows of one prompt and the same two tokens: the second token of the last one is of newer weights."""
    rows = drawn_rows([2] * 3, response_ids=np.array([7, 8] * 3, dtype=np.int32), newest_version=np.full(3, 1))
    noted = replace(rows, version=np.array([0, 0, 0, 0, 0, 1], dtype=np.int32))
    first, second, *others = collect_tokens(noted).context.tolist()
    assert first != second
    assert others[:3] == [first, second, first]
    assert others[3] not in (first, second)


def test_log_probs_are_centred_where_two_tokens_are_known() -> None:
    found = center_within_contexts(SAMPLED)
    assert found.count == 1
    # log 0.5 and log 0.25 are half of log 2 from their mean, under either policy: a constant is gone.
    assert found.mu.tolist() == pytest.approx([math.log(2) / 2, -math.log(2) / 2])
    assert found.old.tolist() == pytest.approx(found.mu.tolist())


def test_an_estimate_of_clusters_that_agree_has_no_width() -> None:
    sums = sum_by_cluster(np.array([[1.0, 2.0, 1.0, 2.0], [2.0, 4.0, 3.0, 3.0]]), np.array([0, 1, 3, 3]))
    assert sums.tolist() == [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]  # no token is of cluster 2
    found = estimate(sums, lambda total: float(total[0] / total[1]))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert estimate(0 * sums, lambda total: float(total[0] / total[1])) is None
