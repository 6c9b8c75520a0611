"""Noise floor of OPSM's delta: from which rows it is read, and what is said where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from recipe.offpolicy.analysis.calibration.floor import NotIdentifiedError, estimate_noise_floor
from recipe.offpolicy.analysis.calibration.parts import BoundedPart
from recipe.offpolicy.analysis.calibration.scores import RowState, Scores
from recipe.offpolicy.correction.read_parts import read_mask
from tests.support.corrections import opsm

ROWS = 400
PART = BoundedPart("masks.opsm", read_mask(opsm(0.1), key="correction.masks.opsm"), "lower")


def scores() -> Scores:
    """Values log(pi / mu) of -1/400, -2/400, ... -1, each row its own prompt."""
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
    """The 0.9-quantile of 1/400 ... 400/400 is 0.9; its 95 % bound lies 1.645 sqrt(0.09 / 400) above, at 0.925."""
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
