"""The units on which each part decides, for all rows and for a sample of the prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.parts import list_parts
from recipe.offpolicy.analysis.calibration.scores import (
    PromptSample,
    Scores,
    compute_scores,
    hash_prompts,
    number_prompts,
)
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Step
from tests.support.corrections import GSM, band, spec
from tests.support.recordings import NONE, drawn_rows


def test_a_prefix_is_scored_by_the_bound_of_its_first_token() -> None:
    """Bounds grow with sqrt t, so sums of 0.3 and 0.6 need bounds of 0.3 and 0.6 / sqrt 2."""
    mu = np.full(2, -2.0, dtype=np.float32)
    rows = drawn_rows([2], rollout_log_prob=mu, old_log_prob=mu + np.float32(0.3))
    mask = band(0.9, 1.2, aggregate="product", level="prefix") | {"by_position": 0.5}
    (part,) = list_parts(correction := spec(None, ctpo=mask))
    scores, _ = compute_scores([Step(rows, NONE, ())], correction, [part])
    assert sorted(scores["masks.ctpo"].high.tolist()) == pytest.approx([0.3, 0.6 / 2**0.5], rel=1e-5)


M2PO = {"ratio": "rollout", "level": "token", "aggregate": "second_moment", "budget": 0.01, "when": "any"}
ICEPOP = {"ratio": "rollout", "level": "token", "aggregate": "product", "lower": 0.5, "upper": 2.0, "when": "any"}
SPEC = CorrectionSpec.from_mapping({"masks": {"gsm": GSM, "icepop": ICEPOP, "m2po": M2PO}})


def steps_of(count: int, rows: int = 64) -> list[Step]:
    """Steps of rows of 5 to 9 tokens, with 4 rows per prompt; prompts have different names in each step."""
    found = []
    for step in range(1, count + 1):
        drawn = drawn_rows([5 + row % 5 for row in range(rows)], step=step, seed=step, backend=0.1, drift=0.05)
        named = np.array([f"{step}-{uid}" for uid in drawn.uid], dtype=object)
        found.append(Step(replace(drawn, uid=named), NONE, ()))
    return found


def test_a_sample_holds_the_units_that_its_prompts_have_among_all() -> None:
    """This includes a budget, which each batch distributes over all of its rows."""
    steps, parts, sample = steps_of(3), list_parts(SPEC), PromptSample(tokens=0.3, rows=0.6)
    whole, states = compute_scores(steps, SPEC, parts)
    some, state = compute_scores(steps, SPEC, parts, sample=sample)
    prompts = np.concatenate([hash_prompts(step.rows) for step in steps])
    kept = sample.find_rows(prompts)
    assert 0 < kept.sum() < len(prompts)
    assert state.apart.tolist() == states.apart[kept].tolist()
    for part in parts:
        share = 0.6 if part.key == "masks.gsm" else 0.3
        expected: Scores = whole[part.key].select((prompts / 2.0**64 < share)[whole[part.key].row])
        found = some[part.key]
        assert len(found) > 0
        for name in ("low", "high", "looked", "tokens", "length"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        assert np.flatnonzero(kept)[found.row].tolist() == expected.row.tolist()
        groups = (number_prompts(each.group.astype(np.uint64)).tolist() for each in (found, expected))
        assert next(groups) == next(groups)
