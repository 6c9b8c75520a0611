"""A recording that takes more memory than a machine may have is said to be large before it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.analysis.attribution import attribution
from recipe.offpolicy.analysis.attribution.attribution import check_memory
from recipe.offpolicy.recording import Recording
from tests.support.recordings import drawn_rows, record


def test_steps_that_fit_are_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(record(tmp_path, *(drawn_rows([20] * 8, step=step) for step in (1, 2, 3, 4))))
    assert check_memory(recording) == ""
    size = sum(path.stat().st_size for step in recording.steps for path in recording.files[step])
    # Two of four steps of one size fit.
    monkeypatch.setattr(attribution, "_MUCH", attribution._MEMORY * size * 0.6)
    assert "steps 1 to 4" in check_memory(recording)
    assert "With --steps 1:2 " in check_memory(recording)
    assert check_memory(recording, (1, 2)) == ""
