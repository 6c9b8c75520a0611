"""The benchmark of the analysis tools at a small size: a row for each tool."""

from __future__ import annotations

from pathlib import Path

from recipe.offpolicy.recording import Recording
from scripts.benchmark import analysis


def test_a_recording_has_its_size(tmp_path: Path) -> None:
    analysis.draw(tmp_path, 20_000, 8_000)
    recording = Recording(tmp_path)
    assert recording.steps == [1, 2]
    assert sum(step.rows.tokens for step in recording) == 16_000
