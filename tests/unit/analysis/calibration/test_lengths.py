"""Whether one bound suits all lengths, and the noise floor that a delta must clear."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.parts import list_parts
from recipe.offpolicy.analysis.calibration.propose import (
    CalibrationRequest,
    Proposal,
    find_length_bucket,
    measure_length_dependence,
    propose_bounds,
)
from recipe.offpolicy.analysis.calibration.scores import Scores
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.statistics import BUCKETS
from recipe.offpolicy.recording import Rows, Step
from tests.support.recordings import NONE, drawn_rows

BAND = {"ratio": "rollout", "level": "sequence", "aggregate": "geometric", "when": "any", "lower": 0.99, "upper": 1.01}
OPSM = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": 0.1, "when": "negative"}
LENGTHS = (10, 40, 160, 640)


def noisy(count: int = 60, seed: int = 0, noise: float = 0.03, drift: float = 0.0, **columns: Any) -> Rows:
    """``count`` rows of each of four lengths, zero-mean noise a token, in groups of 4."""
    lengths = np.repeat(LENGTHS, count)
    uid = np.array([f"{columns.get('step', 1)}-{row // 4}" for row in range(len(lengths))], dtype=object)
    return drawn_rows(lengths, seed=seed, backend=noise, drift=drift, uid=uid, **columns)


def proposed(mask: dict[str, Any], *rows: Rows, **request: Any) -> Proposal:
    spec = CorrectionSpec.from_mapping({"masks": {"it": mask}})
    steps = [Step(each, NONE, ()) for each in rows]
    return propose_bounds(steps, spec, CalibrationRequest(**({"target_kept": 0.9} | request))).proposals[0]


def units(value: np.ndarray, length: np.ndarray) -> Scores:
    count = len(value)
    ones = np.ones(count, dtype=np.int64)
    return Scores(value, value, np.ones(count, dtype=bool), ones, length, np.arange(count), np.arange(count) // 4)


def test_buckets_are_those_of_the_metrics() -> None:
    """T = 16 is the last of le16; 4097 the first of gt4096."""
    names = [list(BUCKETS)[index] for index in find_length_bucket(np.array([1, 16, 17, 64, 65, 1024, 4096, 4097]))]
    assert names == ["le16", "le16", "le64", "le64", "le256", "le1024", "le4096", "gt4096"]


def test_an_offset_hides_no_spread() -> None:
    """A constant offset of 1 with noise that shrinks: the size hardly varies, the spread about the median does."""
    rng = np.random.default_rng(1)
    length = np.repeat(LENGTHS, 60)
    test = measure_length_dependence(units(1 + 0.03 * rng.standard_normal(240) / np.sqrt(length), length), 0.95)
    assert test.depends
    assert test.measure == "spread"


def test_false_alarms_are_as_rare_as_asked() -> None:
    """Statistics of one law at all lengths, like siblings: at most 5 % of 300 draws, with 3 standard errors, 8.8 %."""
    rng = np.random.default_rng(5)
    length = np.repeat(LENGTHS, 40)
    alarms = sum(
        measure_length_dependence(
            units(rng.standard_normal(40)[np.arange(160) // 4] * rng.uniform(0.5, 1, 160), length), 0.95
        ).depends
        for _ in range(300)
    )
    assert 0 < alarms / 300 <= 0.088


def test_bounds_by_length_follow_the_noise() -> None:
    """Keeping 0.9 of rows takes 1.645 s / sqrt(T): half of it for four times the length."""
    proposal = proposed(BAND, noisy(count=400), target_kept=0.9)
    assert [entry.bucket for entry in proposal.lengths] == ["le16", "le64", "le256", "le1024"]
    for entry, length in zip(proposal.lengths, LENGTHS, strict=True):
        assert entry.threshold.radius == pytest.approx(1.645 * 0.03 / math.sqrt(length), rel=0.12)
        low, high = entry.threshold.interval
        assert low < 1.645 * 0.03 / math.sqrt(length) < high
    reached = [entry.reached for entry in proposal.lengths]
    assert reached[0] < 0.75, "the common bound rejects short rows"
    assert reached[-1] == 1.0


def test_a_bucket_of_few_rows_has_no_bound() -> None:
    lengths = [10] * 60 + [100] * 60 + [300] * 5
    entry = proposed(BAND, drawn_rows(lengths, backend=0.03)).lengths[-1]
    assert entry.rows == 5
    assert not entry.threshold.values
    assert "5 rows" in entry.threshold.note


def opsm(*rows: Rows, **request: Any) -> Proposal:
    return proposed(OPSM, *rows, **({"floor_quantile": 0.95} | request))


def test_delta_clears_the_noise_floor() -> None:
    """The 0.95-quantile of s / sqrt(T) noise in rows of 40 tokens, 1.645 * 0.03 / sqrt(40) = 0.0078, is exceeded.

    Asked to keep 0.75, a smaller delta would do: only rows of negative advantage can go.
    """
    rows = drawn_rows([40] * 800, backend=0.03, uid=np.array([f"{row}" for row in range(800)], dtype=object))
    proposal = opsm(rows, target_kept=0.75)
    floor = proposal.floor
    assert floor is not None
    assert floor.quantile == pytest.approx(0.0078, rel=0.15)
    assert floor.quantile < floor.delta < 1.3 * floor.quantile
    assert (floor.rows, floor.groups, floor.unknown_versions) == (800, 800, 0)
    assert proposal.threshold.values["delta"] >= floor.delta
    assert proposal.threshold.reached > 0.75
    assert "backend-noise floor keeps" in proposal.threshold.note


def test_drift_lifts_delta_above_the_floor() -> None:
    """Half of the rows recorded at a later mini-batch, with drift: their tail decides, not the noise."""
    still = noisy(seed=1, noise=0.01)
    moved = replace(noisy(seed=2, noise=0.01), mini_batch=np.ones(240, dtype=np.int32))
    moved = replace(moved, log_prob=moved.old_log_prob - np.float32(0.2))
    proposal = opsm(still, moved, target_kept=0.95)
    assert proposal.floor is not None
    assert proposal.floor.rows == 240
    assert proposal.floor.delta < 0.02
    assert proposal.threshold.radius > 0.19


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mini_batch": np.ones(240, dtype=np.int32)}, "no row was recorded at mini_batch 0"),
        ({"oldest_version": np.full(240, 2), "step": 5}, r"sampled by older weights \(staleness 2 or more\)"),
        ({"shift": 0.5}, "log_prob differs from old_log_prob by 0.5"),
        (
            {"mini_batch": np.arange(240, dtype=np.int32) % 2, "shift": math.nan},
            "no row at mini_batch 0 has a token with a finite log_prob",
        ),
    ],
)
def test_no_floor_no_delta(change: dict[str, Any], message: str) -> None:
    """Where the noise is not identified nothing is proposed, and the sentence says what is missing."""
    rows = noisy(**{name: value for name, value in change.items() if name != "shift"})
    first = (rows.mini_batch == 0)[rows.row_of_token]
    shifted = rows.log_prob + np.float32(change.get("shift", 0.0))
    rows = replace(rows, log_prob=np.where(first, shifted, rows.log_prob))
    proposal = opsm(rows)
    assert not proposal.found
    assert proposal.floor is None
    assert re.search(message, proposal.threshold.note)
    assert "not identified" in proposal.threshold.note


@pytest.mark.parametrize("proximal", [{"proximal": "bypass"}, {"proximal": "loglinear", "alpha": 0.5}])
def test_a_pi_old_made_of_mu_does_not_choose_quiet_rows(proximal: dict[str, Any]) -> None:
    """240 rows of noise 0.03 and 240 of 0.0005: the recorded pi_old is near pi in quiet rows alone."""
    engines = [noisy(seed=1), noisy(seed=2, noise=0.0005)]
    share = np.float32(proximal.get("alpha", 0.0))
    steps = [
        Step(
            replace(rows, old_log_prob=rows.rollout_log_prob + share * (rows.log_prob - rows.rollout_log_prob)),
            CorrectionSpec.from_mapping(proximal).to_mapping(),
            (),
        )
        for rows in engines
    ]
    spec = CorrectionSpec.from_mapping({"masks": {"it": OPSM}} | proximal)
    request = CalibrationRequest(target_kept=0.9, floor_quantile=0.95)
    floor = propose_bounds(steps, spec, request).proposals[0].floor
    known = opsm(*engines).floor
    assert floor is not None
    assert floor.rows == 480
    assert floor == known


def test_too_few_rows_for_the_quantile() -> None:
    """0.95^n <= 0.05 takes 59 independent rows."""
    rows = drawn_rows([20] * 40, backend=0.03)
    note = opsm(rows).threshold.note
    assert "40 rows in 10 prompt groups" in note
    assert "needs 59" in note
    assert note.endswith("Record more steps, or pass --floor-quantile 0.9 to calibrate.")
    assert opsm(rows, floor_quantile=0.9).floor is not None
    assert opsm(drawn_rows([20] * 8, backend=0.03)).threshold.note.endswith("Record more steps.")


def test_versions_that_are_not_known_are_said() -> None:
    rows = noisy(oldest_version=np.full(240, -1), newest_version=np.full(240, -1))
    proposal = opsm(rows)
    assert proposal.floor is not None
    assert proposal.floor.unknown_versions == 240


def test_other_bounds_have_no_floor() -> None:
    assert proposed(BAND | {"upper": None}, noisy()).floor is None
    assert list_parts(CorrectionSpec.from_mapping({"masks": {"it": OPSM}}))[0].side == "lower"
