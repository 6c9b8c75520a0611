"""One entry in the table makes an aggregate known to masks, validation, start-up checks and calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recipe.offpolicy.analysis.calibration.kept_bounds import find_largest_radius
from recipe.offpolicy.analysis.calibration.parts import list_parts
from recipe.offpolicy.analysis.calibration.scores import compute_scores
from recipe.offpolicy.batch.micro_batch import MicroBatch
from recipe.offpolicy.correction import CorrectionSpec, SpecError
from recipe.offpolicy.correction.masks import AGGREGATES, Aggregate
from recipe.offpolicy.correction.read_parts import read_mask
from recipe.offpolicy.monitor.moving_bounds import (
    EDGES,
    Evidence,
    Histogram,
    Schedule,
    find_keeping_distance,
)
from recipe.offpolicy.proof.trials import build_mask_trials
from recipe.offpolicy.recording import Step
from tests.support.recordings import NONE, drawn_rows

MASK = {"ratio": "rollout", "level": "sequence", "aggregate": "l1_mean", "lower": None, "upper": 0.1, "when": "any"}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean of |log r|, which no file of the project knows."""
    entry = Aggregate(
        "l1_mean",
        "mean",
        (None, 0.05),
        token=lambda log_ratio, numerator, denominator: log_ratio.abs(),
        least=0.0,
        at=abs,
    )
    monkeypatch.setitem(AGGREGATES, entry.name, entry)  # type: ignore[arg-type]


def test_it_is_read_and_its_range_is_held() -> None:
    assert read_mask(MASK, key="correction.masks.l1").limits == (-math.inf, 0.1)
    with pytest.raises(SpecError, match="l1_mean is never negative"):
        read_mask(MASK | {"upper": -0.1}, key="correction.masks.l1")
    with pytest.raises(SpecError) as refused:
        read_mask(MASK | {"upper": None}, key="correction.masks.l1")
    assert refused.value.problem.overrides == ("correction.masks.l1.upper=0.05",)


def test_it_is_scored_and_its_online_bound_moves() -> None:
    correction = CorrectionSpec.from_mapping({"weight": None, "masks": {"l1": MASK}})
    (part,) = list_parts(correction)
    rows = drawn_rows(np.array([3, 5]), seed=0)
    scores, _ = compute_scores([Step(rows, NONE, ())], correction, [part])
    apart = np.abs(rows.old_log_prob.astype(np.float64) - rows.rollout_log_prob)
    assert sorted(scores[part.key].high) == pytest.approx(sorted([apart[:3].mean(), apart[3:].mean()]), rel=1e-6)
    assert part.side == "upper"
    assert find_largest_radius(part) == pytest.approx(math.log(10))
    mask = correction.masks[0][1]
    schedule = Schedule(find_keeping_distance, 0.5, "upper", rate=0.1, floor=0.1, ceiling=10.0, noise_kept=0.99)
    empty = Histogram(EDGES, [0.0] * (len(EDGES) + 1), units=0.0)
    assert Evidence(schedule, mask, mask, empty).compute_next_bounds() == {"lower": None, "upper": 0.1}


def test_the_proof_asks_nobody_and_refuses_what_it_does_not_state() -> None:
    mask = read_mask(MASK, key="correction.masks.l1")
    tokens = torch.zeros(2, 3)
    batch = MicroBatch(tokens.long(), tokens == 0, tokens, tokens, tokens, tokens)
    with pytest.raises(NotImplementedError, match="l1_mean"):
        list(build_mask_trials("l1", mask, batch))
