"""Weights of the tokens of one sign of the advantage: by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from tests.support.corrections import TIS, run, values
from tests.support.presets import PRESETS

LOG = math.log
NEGATIVE, POSITIVE = TIS | {"when": "negative"}, TIS | {"when": "positive", "upper": 4.0}


def by_sign(**weights: dict[str, Any]) -> CorrectionSpec:
    return CorrectionSpec.from_mapping({"weights": weights})


def test_each_sign_has_a_cap_of_its_own() -> None:
    """rho = 8 everywhere: min(8, 2) in the row of A = -1, min(8, 4) in that of A = 1, and 1 where A = 0."""
    step = run(by_sign(a=NEGATIVE, b=POSITIVE), mu=torch.zeros(3, 2), old=[[LOG(8)] * 2] * 3, advantages=[-1.0, 1.0, 0])
    torch.testing.assert_close(step.weight, torch.tensor([[2.0, 2.0], [4.0, 4.0], [1.0, 1.0]]))
    assert step.keep.all()
    assert values(step)["weight/mean"] == pytest.approx((2 + 2 + 4 + 4 + 1 + 1) / 6)
    # The raw weights of the four tokens that are weighed are 8, of the others 1.
    assert values(step)["raw_weight/mean"] == pytest.approx((4 * 8 + 2) / 6)
    assert values(step)["weight/truncated_share"] == pytest.approx(4 / 6)


def test_a_weight_after_a_tools_result_alone() -> None:
    """rho = 8 everywhere; 1 before the tool's token, min(8, 2) after it, and kept in any case."""
    mask, turns = [[1, 0, 1, 1], [1, 1, 1, 1]], [[0, 0, 1, 1], [0, 0, 0, 0]]
    weights = by_sign(a=TIS | {"when": "post_tool"})
    step = run(weights, mu=torch.zeros(2, 4), old=[[LOG(8)] * 4] * 2, mask=mask, turns=turns)
    torch.testing.assert_close(step.weight, torch.tensor([[1.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]))
    band = {"ratio": "rollout", "level": "sequence", "aggregate": "geometric", "lower": 0.5, "upper": 2.0}
    masks = CorrectionSpec.from_mapping({"masks": {"m": band | {"when": "post_tool"}}})
    step = run(masks, mu=torch.zeros(2, 4), old=[[LOG(8)] * 4] * 2, mask=mask, turns=turns)
    assert step.keep.tolist() == [[True, False, False, False], [True] * 4]
    with pytest.raises(ValueError, match=r"when=post_tool without segment_ids"):
        run(masks, mu=torch.zeros(2, 4), old=[[LOG(8)] * 4] * 2)


def test_topr_by_hand() -> None:
    """min(prod pi / mu, 1) of rows with A < 0: products 1/4 and 4 give 1/4 and 1; a row with A > 0 keeps weight 1."""
    two, half = LOG(2), LOG(0.5)
    pi = [[half, half], [two, two], [half, half]]
    step = run(PRESETS["paper/topr"], mu=torch.zeros(3, 2), old=torch.zeros(3, 2), pi=pi, advantages=[-1.0, -1.0, 1.0])
    torch.testing.assert_close(step.weight, torch.tensor([[0.25, 0.25], [1.0, 1.0], [1.0, 1.0]]))


def test_advantages_have_to_be_known() -> None:
    from recipe.offpolicy.correction import rollout_stage, step_stage

    zeros = torch.zeros(1, 2)
    correction = by_sign(a=NEGATIVE)
    stage = rollout_stage(correction, old_log_prob=zeros, rollout_log_prob=zeros, response_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"correction\.weights\.a\.when=negative without advantages"):
        step_stage(correction, stage, log_prob=zeros)
