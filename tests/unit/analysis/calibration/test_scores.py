"""The correction that acted at a recorded step, and the parts whose bounds are calibrated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.kept_bounds import check_radius, find_largest_radius
from recipe.offpolicy.analysis.calibration.parts import BoundedPart, list_parts
from recipe.offpolicy.analysis.calibration.scores import compute_scores
from recipe.offpolicy.correction import MaskSpec, WeightSpec
from recipe.offpolicy.correction.ratios import EXP_CLAMP
from recipe.offpolicy.recording import Step
from tests.support.corrections import band, spec
from tests.support.recordings import NONE, drawn_rows


def test_a_mask_on_what_leads_away_looks_at_those_tokens() -> None:
    """log rho = 0.5 and -0.5 in one row of A = 1, and in one of A = -1: one token of each leads away."""
    mu = np.full(4, -2.0, dtype=np.float32)
    rho = np.array([0.5, -0.5, 0.5, -0.5], dtype=np.float32)
    advantages = np.array([1, 1, -1, -1], dtype=np.float32)
    rows = drawn_rows([2, 2], rollout_log_prob=mu, old_log_prob=mu + rho, advantages=advantages)
    correction = spec(None, vaco=band(None, 0.3, aggregate="tv_mean", when="outward"))
    (part,) = list_parts(correction)
    scores, _ = compute_scores([Step(rows, NONE, ())], correction, [part])
    assert (part.share_of, part.looks_at) == ("tokens", "tokens with A log r > 0")
    found = scores["masks.vaco"]
    assert sorted(zip(found.row.tolist(), found.looked.tolist(), strict=True)) == [
        (0, False),
        (0, True),
        (1, False),
        (1, True),
    ]
    # Every token has its row's mean of |rho - 1| / 2, (0.6487 + 0.3935) / 4.
    assert found.high == pytest.approx([0.26055] * 4, rel=1e-4)


def test_a_mask_after_a_tools_output_looks_at_those_tokens() -> None:
    """One row of two turns, by a tool's token between them: the second turn's two tokens."""
    mu = np.full(4, -2.0, dtype=np.float32)
    rho = np.array([0.5, 0.0, 0.1, 0.3], dtype=np.float32)
    mask, turn = np.array([True, False, True, True]), np.array([0, 0, 1, 1], dtype=np.int16)
    rows = drawn_rows([4], rollout_log_prob=mu, old_log_prob=mu + rho, response_mask=mask, turn=turn)
    correction = spec(None, tool=band(0.9, 1.2, aggregate="product", level="token", when="post_tool"))
    (part,) = list_parts(correction)
    scores, _ = compute_scores([Step(rows, NONE, ())], correction, [part])
    assert (part.share_of, part.looks_at) == ("tokens", "tokens after a tool's result")
    found = scores["masks.tool"]
    looked = {round(float(high), 3): bool(at) for high, at in zip(found.high, found.looked, strict=True)}
    assert looked == {0.5: False, 0.1: True, 0.3: True}


def test_a_prefix_is_scored_by_the_bound_of_its_first_token() -> None:
    """Bounds grow with sqrt t, so that sums of 0.3 and 0.6 ask for bounds of 0.3 and 0.6 / sqrt 2."""
    mu = np.full(2, -2.0, dtype=np.float32)
    rows = drawn_rows([2], rollout_log_prob=mu, old_log_prob=mu + np.float32(0.3))
    mask = band(0.9, 1.2, aggregate="product", level="prefix") | {"by_position": 0.5}
    (part,) = list_parts(correction := spec(None, ctpo=mask))
    scores, _ = compute_scores([Step(rows, NONE, ())], correction, [part])
    assert sorted(scores["masks.ctpo"].high.tolist()) == pytest.approx([0.3, 0.6 / 2**0.5], rel=1e-5)


GSM = MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any")
CAP = WeightSpec("sequence", "truncate", None, 2.0)


def test_a_bound_beyond_what_related_policies_reach() -> None:
    part = BoundedPart("masks.gsm", GSM, "both")
    assert check_radius(part, math.log(1.01)) == ""
    assert check_radius(part, 5.0).startswith("not identified: it would take a bound at 5 nats")
    # A product over a row may grow as far as ratios are clamped.
    assert find_largest_radius(BoundedPart("weight", CAP, "upper")) == EXP_CLAMP
