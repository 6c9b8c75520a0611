"""The correction that acted at a recorded step."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.analysis.calibration.scores import read_recorded_spec
from recipe.offpolicy.recording import Recording, RecordingError
from tests.support.corrections import GSM, TIS, spec
from tests.support.recordings import drawn_rows, record


def test_it_is_read_from_the_file(tmp_path: Path) -> None:
    acted = spec(TIS, gsm=GSM)
    step = Recording(record(tmp_path, drawn_rows([2, 3]), spec=acted.to_mapping())).step(1)
    assert read_recorded_spec(step) == acted


def test_a_file_that_holds_none_is_named_by_its_step(tmp_path: Path) -> None:
    step = Recording(record(tmp_path, drawn_rows([2, 3], step=7), spec={"weight": 5})).step(7)
    with pytest.raises(RecordingError, match="step 7: its file's metadata holds no valid correction"):
        read_recorded_spec(step)
