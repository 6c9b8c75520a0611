"""Weights of the tokens of one sign of the advantage: by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.read_parts import read_weight
from recipe.offpolicy.correction.rules import overlap
from tests.support.corrections import TIS, run, values
from tests.support.presets import PRESETS
from tests.support.refusals import mask, refused

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


def test_the_mapping_has_them_where_they_are_set_alone() -> None:
    correction = by_sign(b=POSITIVE, a=NEGATIVE | {"sign": "row"})
    assert CorrectionSpec.from_mapping(correction.to_mapping()) == correction
    assert [name for name, _ in correction.weights] == ["a", "b"]
    assert "weights" not in CorrectionSpec().to_mapping()
    assert read_weight(NEGATIVE).to_mapping()["when"] == "negative"
    assert correction.all_weights.keys() == {"weights.a", "weights.b"}
    assert not correction.is_none


@pytest.mark.parametrize(
    "weights",
    [
        {"a": NEGATIVE, "b": NEGATIVE | {"upper": 3.0}},
        {"a": TIS | {"when": "any"}, "b": NEGATIVE},
        {"a": NEGATIVE, "b": POSITIVE | {"sign": "token"}},
    ],
)
def test_weights_that_share_tokens(weights: dict[str, Any]) -> None:
    refused(
        {"weights": weights}, "correction.weights.b.when=", "a token can have only one weight", "Give one when=negative"
    )


def test_a_weight_of_every_token_leaves_none_for_others() -> None:
    refused(
        {"weight": TIS, "weights": {"a": NEGATIVE}}, "correction.weight=", "weighted twice", "correction.weight=null"
    )


def test_what_weights_by_sign_cannot_have() -> None:
    refused({"weights": {"a": TIS}}, "correction.weights.a.when", "it has no default")
    refused({"weights": {"a": 2.0}}, "correction.weights.a=2.0", "mapping")
    refused({"weights": [TIS]}, "correction.weights=", "mapping", "such as paper/topr")
    refused({"weights": {"min": NEGATIVE}}, "correction.weights.min", "'min'")
    refused({"weights": {"a": NEGATIVE | {"normalize": True}}}, "correction.weights.a.normalize", "each gradient step")
    refused({"weights": {"a": TIS | {"when": "any", "sign": "token"}}}, "correction.weights.a.sign", "sign=row")
    refused({"weights": {"a": NEGATIVE}, "proximal": "bypass"}, "correction.weights.a.ratio", "count it twice")
    refused({"weights": {"a": NEGATIVE}, "skyrl_compat": True} | mask(), "correction.skyrl_compat", "weights.a")
    reject = NEGATIVE | {"kind": "reject"}
    refused(
        {"weights": {"a": reject}, "denominator": "kept"} | mask(), "correction.denominator", "weights.a is decided"
    )


def test_what_applies_after_a_tools_result_cannot_have() -> None:
    tool = TIS | {"when": "post_tool"}
    refused({"weights": {"a": tool | {"sign": "token"}}}, "correction.weights.a.sign", "sign=row")
    refused({"weights": {"a": tool, "b": NEGATIVE}}, "correction.weights.b.when=", "a token can have only one weight")
    refused(
        {"weights": {"a": tool | {"by_staleness": [1.0, 2.0]}}}, "correction.weights.a.when=post_tool", "depends on age"
    )
    refused(
        {"weights": {"a": tool | {"level": "prefix"}}}, "correction.weights.a.when=post_tool", "a prefix also holds"
    )
    refused(mask(when="post_tool", level="prefix"), "when=post_tool", "a prefix also holds")


def test_domains() -> None:
    assert not overlap(("negative", "token"), ("positive", "token"))
    assert overlap(("any", "row"), ("positive", "token"))


def test_advantages_have_to_be_known() -> None:
    from recipe.offpolicy.correction import rollout_stage, step_stage

    zeros = torch.zeros(1, 2)
    correction = by_sign(a=NEGATIVE)
    stage = rollout_stage(correction, old_log_prob=zeros, rollout_log_prob=zeros, response_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"correction\.weights\.a\.when=negative without advantages"):
        step_stage(correction, stage, log_prob=zeros)
