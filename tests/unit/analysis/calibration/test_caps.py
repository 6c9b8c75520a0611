"""Caps for a target effective sample size: by hand, replayed through the stages, and covered by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.kept_bounds import compute_ess, find_cap_for_ess
from recipe.offpolicy.analysis.calibration.parts import BoundedPart, list_parts, set_values
from recipe.offpolicy.analysis.calibration.propose import CalibrationRequest, propose_bounds
from recipe.offpolicy.analysis.calibration.scores import Scores, compute_scores
from recipe.offpolicy.correction import CorrectionSpec, rollout_stage
from recipe.offpolicy.correction.statistics import merge_all
from recipe.offpolicy.recording import Rows, Step
from tests.support.corrections import on_host
from tests.support.recordings import NONE, drawn_rows

TIS = {"level": "token", "kind": "truncate", "lower": None, "upper": 2.0}


def part_of(weight: dict[str, Any]) -> tuple[CorrectionSpec, BoundedPart]:
    spec = CorrectionSpec.from_mapping({"weight": weight})
    return spec, list_parts(spec)[0]


def units(log_weight: Any, *, group: Any = None, tokens: Any = None) -> Scores:
    value = np.asarray(log_weight, dtype=np.float64)
    count = len(value)
    ones = np.ones(count, dtype=np.int64)
    return Scores(
        low=value,
        high=value,
        looked=np.ones(count, dtype=bool),
        tokens=ones if tokens is None else np.asarray(tokens),
        length=ones,
        row=np.arange(count),
        group=np.arange(count) if group is None else np.asarray(group),
    )


def logged_ess(spec: CorrectionSpec, *steps: Rows) -> float:
    """offpolicy/weight/ess over all steps."""
    seen = []
    for rows in steps:
        tensors = rows.padded("rollout_log_prob", "old_log_prob", "turn")
        tensors["segment_ids"] = tensors.pop("turn").long()
        stage = rollout_stage(spec, **tensors)
        seen.append(on_host({"ess": stage.statistics["weight/ess"]}))
    return merge_all(seen)["ess"].value()


def test_two_weights_by_hand() -> None:
    """Weights 1 and 4 of one token each. With cap c, ESS = (1 + c)^2 / (2 (1 + c^2)), which is 0.9 at c = 2.

    (1 + 2)^2 / (2 * 5) = 9/10.
    """
    _, part = part_of(TIS)
    scores = units([0.0, math.log(4)])
    assert compute_ess(part, scores, part.limits) == pytest.approx(0.9)
    found = find_cap_for_ess(part, scores, 0.9, 0.95)
    assert math.exp(found.radius) == pytest.approx(2.0)
    assert found.values == {"upper": 2.0}


def test_not_needed_and_not_reachable() -> None:
    _, part = part_of(TIS)
    easy = find_cap_for_ess(part, units([0.0, 0.01]), 0.9, 0.95)
    assert not easy.values
    assert easy.note.startswith("not needed: without a cap the ESS is 0.99997")
    # Weights 1, 1 and 0.01: a cap at 1 leaves (2.01)^2 / (3 * 2.0001) = 0.673.
    hard = find_cap_for_ess(part, units([0.0, 0.0, math.log(0.01), math.log(3)]), 0.99, 0.95)
    assert not hard.values
    assert "not reachable" in hard.note


WEIGHTS = {
    "clip": TIS | {"kind": "clip", "lower": 0.5},
    "reject": TIS | {"kind": "reject", "lower": 0.5},
    "turn": TIS | {"level": "turn"},
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_replaying_the_cap_gives_the_target(name: str) -> None:
    """The replayed offpolicy/weight/ess is the target, or at most 2 % of 1 - target larger."""
    spec, part = part_of(WEIGHTS[name])
    rng = np.random.default_rng(3)
    steps = [drawn_rows(rng.integers(2, 30, 80), seed=seed, step=seed, backend=0.4) for seed in (1, 2)]
    scores, _ = compute_scores([Step(rows, NONE, ()) for rows in steps], spec, [part])
    uncapped = compute_ess(part, scores["weight"], part.compute_limits_at(math.inf))
    target = uncapped + (0.002 if name == "reject" else 0.3 * (1 - uncapped))
    found = find_cap_for_ess(part, scores["weight"], target, 0.95)
    ess = logged_ess(set_values(spec, "weight", found.values), *steps)
    assert found.reached == pytest.approx(ess, rel=1e-6)
    assert found.interval[0] < found.radius < found.interval[1]
    assert target - 1e-6 <= ess <= target + 0.02 * (1 - target) + (0.002 if name == "reject" else 0)


def test_the_cap_of_one_sign_is_that_of_the_rows_it_weighs() -> None:
    """One token per row: rho = 1 and 4 with A < 0, and 100 with A > 0, which a weight of negative rows does not change.

    For the first two, (1 + c)^2 / (2 (1 + c^2)) is 0.9 at c = 2.
    """
    rho = np.log(np.array([1.0, 4.0, 100.0], dtype=np.float32))
    mu, advantages = np.full(3, -6.0, dtype=np.float32), np.array([-1.0, -1.0, 1.0], dtype=np.float32)
    rows = drawn_rows([1, 1, 1], rollout_log_prob=mu, old_log_prob=mu + rho, advantages=advantages)
    spec = CorrectionSpec.from_mapping({"weights": {"a": TIS | {"when": "negative"}}})
    (part,) = list_parts(spec)
    assert (part.key, part.looks_at) == ("weights.a", "tokens with A < 0")
    request = CalibrationRequest(target_ess=0.9)
    (proposal,) = propose_bounds([Step(rows, NONE, ())], spec, request).proposals
    assert proposal.looked == pytest.approx(2 / 3)
    assert proposal.now == pytest.approx(0.9)
