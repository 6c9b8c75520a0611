"""log pi_old by the trainer's own weights, from recordings of each source of pi_old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.recording import Recording, Step
from recipe.offpolicy.recording.pi_old import find_scored_rows, get_trainers_pi_old
from tests.support.recordings import drawn_rows, record


def step_under(directory: Path, correction: dict[str, Any]) -> Step:
    """Two rows of two tokens, the second of a later mini-batch."""
    spec = CorrectionSpec.from_mapping(correction).to_mapping()
    rows = drawn_rows([2, 2], drift=0.1, mini_batch=np.array([0, 1], dtype=np.int32))
    return Recording(record(directory, rows, spec=spec)).step(1)


def test_a_forward_pass_is_recorded_as_it_was(tmp_path: Path) -> None:
    step = step_under(tmp_path, {})
    assert find_scored_rows(step).tolist() == [True, True]
    assert get_trainers_pi_old(step).tolist() == step.rows.old_log_prob.tolist()


def test_pi_of_the_first_gradient_step_stands_in(tmp_path: Path) -> None:
    step = step_under(tmp_path, {"proximal": "bypass"})
    assert find_scored_rows(step).tolist() == [True, False]
    found = get_trainers_pi_old(step)
    assert found[:2] == pytest.approx(step.rows.log_prob[:2])
    assert np.isnan(found[2:]).all()
