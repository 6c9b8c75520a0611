"""Intervals for rows in prompt groups, the noise floor of a delta, and whether one bound suits all lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.floor import (
    NotIdentifiedError,
    compute_least_count,
    compute_quantile_interval,
    compute_share_interval,
    estimate_noise_floor,
    estimate_share,
    resample_totals,
)
from recipe.offpolicy.analysis.calibration.parts import BoundedPart
from recipe.offpolicy.analysis.calibration.propose import (
    CalibrationRequest,
    Proposal,
    propose_bounds,
)
from recipe.offpolicy.analysis.calibration.scores import RowState, Scores
from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.read_parts import read_mask
from recipe.offpolicy.recording import Rows, Step
from tests.support.corrections import opsm
from tests.support.recordings import NONE, drawn_rows


def test_design_effect_of_groups_that_agree() -> None:
    """3 groups of 4 equal rows, kept 4, 4, 0: share 2/3; residuals 4 - 2/3 4 = 4/3, 4/3, -8/3, sum of squares 96/9.

    Variance of the share = 3/2 (96/9) / 144 = 1/9; independent (2/3)(1/3)/12 = 1/54; effect 6, effective 12/6 = 2.
    """
    found = estimate_share(np.repeat([True, True, False], 4), np.repeat([0, 1, 2], 4))
    assert (found.count, found.groups) == (12, 3)
    assert found.share == pytest.approx(2 / 3)
    assert found.effective == pytest.approx(2.0)


def test_median_of_ten() -> None:
    """Bin(10, 1/2): P(B < 2) = 11/1024 = 0.0107 <= 0.025 < P(B < 3) = 0.0547, so [x(2), x(9)], coverage 0.979."""
    assert compute_quantile_interval(np.arange(1.0, 11), 0.5, 10, 0.95) == (2.0, 9.0)


def test_one_sided_end() -> None:
    """0.99^298 = 0.0500 > 0.05 >= 0.99^299, so the 0.99-quantile needs 299 units."""
    assert compute_least_count(0.99, 0.95) == 299
    assert compute_quantile_interval(np.arange(298.0), 0.99, 298, 0.95, one_sided=True) == (-math.inf, math.inf)
    assert compute_quantile_interval(np.arange(299.0), 0.99, 299, 0.95, one_sided=True) == (-math.inf, 298.0)


def test_wilson() -> None:
    """8 of 10 kept, independent up to 10/9: n = 9, z = 1.96, z^2/n = 0.42684.

    Middle (0.8 + 0.21342) / 1.42684 = 0.71026, half sqrt(0.42684 (0.16 + 0.10671)) / 1.42684 = 0.23647.
    """
    low, high = compute_share_interval(estimate_share(np.arange(10) < 8, np.arange(10)), 0.95)
    assert (low, high) == (pytest.approx(0.47379, abs=1e-4), pytest.approx(0.94673, abs=1e-4))


def test_bootstrap_keeps_groups_whole() -> None:
    """Groups with totals 0 and 10: two groups are drawn, so each sum is 0, 10 or 20, with probabilities 1/4,
    1/2, 1/4.
    """
    sums = resample_totals(np.array([[0.0], [10.0]]), draws=4000, seed=1)[:, 0]
    values, counts = np.unique(sums, return_counts=True)
    assert values.tolist() == [0.0, 10.0, 20.0]
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


ROWS = 400
PART = BoundedPart("masks.opsm", read_mask(opsm(0.1), key="correction.masks.opsm"), "lower")


def scores() -> Scores:
    """Values log(pi / mu) of -1/400, -2/400, ... -1, with one prompt per row."""
    number = np.arange(ROWS)
    value = -(number + 1) / ROWS
    length = np.full(ROWS, 3)
    return Scores(value, value, np.ones(ROWS, dtype=bool), length, length, number, number)


def state(mini_batch: int = 0, staleness: int = 0, apart: float = 0.0) -> RowState:
    return RowState(
        mini_batch=np.full(ROWS, mini_batch, dtype=np.int32),
        staleness=np.full(ROWS, staleness),
        apart=np.full(ROWS, apart),
        grouped=np.ones(ROWS, dtype=bool),
        nonfinite=np.zeros(ROWS, dtype=np.int64),
    )


def test_the_quantile_and_its_bound() -> None:
    """The 0.9-quantile of 1/400 ... 400/400 is 0.9; its 95 % bound is 1.645 sqrt(0.09 / 400) higher, 0.925."""
    found = estimate_noise_floor(PART, scores(), state(), share=0.9, confidence=0.95)
    assert (found.quantile, found.rows, found.groups, found.unknown_versions) == (0.9, ROWS, ROWS, 0)
    assert found.delta == pytest.approx(0.925, abs=0.005)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (state(mini_batch=1), "no row was recorded at mini_batch 0"),
        (state(staleness=2), r"sampled by older weights \(staleness 2 or more\)"),
        (state(apart=np.nan), "no row at mini_batch 0 has a token with a finite log_prob"),
        (state(apart=0.02), "log_prob differs from old_log_prob by 0.02 nats"),
    ],
)
def test_rows_that_tell_nothing_of_the_noise(of: RowState, reason: str) -> None:
    with pytest.raises(NotIdentifiedError, match=reason) as caught:
        estimate_noise_floor(PART, scores(), of, share=0.9, confidence=0.95)
    assert caught.value.key == "masks.opsm.delta"


def test_a_share_that_is_too_high_for_the_rows_names_one_that_is_not() -> None:
    with pytest.raises(NotIdentifiedError, match="400 rows in 400 prompt groups") as caught:
        estimate_noise_floor(PART, scores(), state(), share=0.999, confidence=0.95)
    assert caught.value.reason.endswith("or pass --floor-quantile 0.95 to calibrate.")


OPSM = {"ratio": "full", "level": "sequence", "aggregate": "geometric", "delta": 0.1, "when": "negative"}
LENGTHS = (10, 40, 160, 640)


def noisy(count: int = 60, seed: int = 0, noise: float = 0.03, drift: float = 0.0, **columns: Any) -> Rows:
    """``count`` rows of each of four lengths, with zero-mean noise per token, in groups of 4."""
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


def opsm(*rows: Rows, **request: Any) -> Proposal:
    return proposed(OPSM, *rows, **({"floor_quantile": 0.95} | request))


def test_delta_clears_the_noise_floor() -> None:
    """The delta exceeds the 0.95-quantile of s / sqrt(T) noise in rows of 40 tokens, 1.645 * 0.03 / sqrt(40) = 0.0078.

    To keep 0.75, a smaller delta would be enough, because only rows with negative advantage can be dropped.
    """
    rows = drawn_rows([40] * 800, backend=0.03, uid=np.array([f"{row}" for row in range(800)], dtype=object))
    proposal = opsm(rows, target_kept=0.75)
    floor = proposal.floor
    assert floor.quantile == pytest.approx(0.0078, rel=0.15)
    assert floor.quantile < floor.delta < 1.3 * floor.quantile
    assert (floor.rows, floor.groups, floor.unknown_versions) == (800, 800, 0)
    assert proposal.threshold.values["delta"] >= floor.delta
    assert proposal.threshold.reached > 0.75
    assert "backend-noise floor keeps" in proposal.threshold.note


def test_a_pi_old_made_of_mu_does_not_choose_quiet_rows() -> None:
    """240 rows with noise 0.03 and 240 with 0.0005: the recorded pi_old is close to pi only in rows with
    little noise.
    """
    engines, bypass = [noisy(seed=1), noisy(seed=2, noise=0.0005)], {"proximal": "bypass"}
    acted = CorrectionSpec.from_mapping(bypass).to_mapping()
    steps = [Step(replace(rows, old_log_prob=rows.rollout_log_prob), acted, ()) for rows in engines]
    spec = CorrectionSpec.from_mapping({"masks": {"it": OPSM}} | bypass)
    request = CalibrationRequest(target_kept=0.9, floor_quantile=0.95)
    floor = propose_bounds(steps, spec, request).proposals[0].floor
    known = opsm(*engines).floor
    assert floor.rows == 480
    assert floor == known
