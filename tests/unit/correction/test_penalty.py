"""A penalty on the squared log-ratio: its value and gradient by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.correction_parts import compute_squared_log_ratio
from tests.support.corrections import run, values
from tests.support.refusals import mask, refused


def test_the_gradient_is_twice_the_log_ratio() -> None:
    """log r = 2, -1 and 0: squares 4, 1 and 0, slopes 4, -2 and 0."""
    pi = torch.tensor([[-1.0, -3.0, -2.0]], requires_grad=True)
    squares = compute_squared_log_ratio(pi, torch.tensor([[-3.0, -2.0, -2.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert squares.tolist() == [[4.0, 1.0, 0.0]]
    (slope,) = torch.autograd.grad(squares.sum(), pi)
    assert slope.tolist() == [[4.0, -2.0, 0.0]]


@pytest.mark.parametrize(
    ("penalty", "parts"),
    [
        ({"ratio": "full"}, ("correction.penalty.coefficient", "not set", "Set correction.penalty.coefficient=")),
        ({"ratio": "full", "coefficient": 0.0}, ("correction.penalty.coefficient=0.0", "> 0")),
        ({"ratio": "full", "coefficient": "1"}, ("correction.penalty.coefficient=", "expected a number")),
        ({"ratio": "rollout", "coefficient": 0.1}, ("correction.penalty.ratio=rollout", "Set one of full, ppo")),
        (0.1, ("correction.penalty=0.1", "mapping", "such as log_ratio_penalty")),
    ],
)
def test_what_a_penalty_cannot_be(penalty: Any, parts: tuple[str, ...]) -> None:
    refused({"penalty": penalty}, *parts)


def test_a_count_that_nothing_changes() -> None:
    """``nonfinite=excluded`` needs a part that reads mu, and says nothing alongside ``denominator=kept``."""
    parts = ("correction.nonfinite=excluded", "Set correction.nonfinite=counted")
    refused({"nonfinite": "excluded"}, *parts, "nothing in the correction reads mu")
    refused(mask(ratio="ppo") | {"nonfinite": "excluded"}, *parts)
    refused(mask() | {"nonfinite": "excluded", "denominator": "kept"}, *parts, "correction.denominator=kept")
    refused(mask() | {"nonfinite": "dropped"}, "correction.nonfinite=dropped", "counted, excluded")
    excluded = CorrectionSpec.from_mapping(mask() | {"nonfinite": "excluded"})
    assert excluded.recounts
    assert CorrectionSpec.from_mapping(excluded.to_mapping()) == excluded
    assert "nonfinite" not in CorrectionSpec().to_mapping()


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
