"""A penalty on the squared log-ratio: its value and gradient by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.corrections import run, values
from tests.support.refusals import mask


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
    """mu is NaN on the first token, pi_old on the last."""
    spec = CorrectionSpec.from_mapping(correction)
    assert spec.reads_mu == reads
    if "stale" not in dict(spec.masks):
        step = run(spec, mu=[[math.nan, 0.0, 0.0]], old=[[0.0, 0.0, math.nan]])
        assert step.keep.tolist() == [[not reads, True, False]]
        assert step.weight.tolist() == [[float(not reads), 1.0, 0.0]]
        assert values(step)["nonfinite/rollout_log_prob"] == 1
