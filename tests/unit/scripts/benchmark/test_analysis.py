"""The benchmark of the analysis tools at a small size: a row for each tool, and a recording that is drawn once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from recipe.offpolicy.recording import Recording
from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("analysis_benchmark", ROOT / "scripts" / "benchmark" / "analysis.py")
assert SPEC is not None
assert SPEC.loader is not None
analysis = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(analysis)


def test_a_recording_has_its_size_and_is_drawn_once(tmp_path: Path) -> None:
    drawn = analysis.draw(tmp_path, 20_000, 8_000)
    recording = Recording(drawn)
    assert recording.steps == [1, 2]
    assert sum(step.rows.tokens for step in recording) == 16_000
    times = [path.stat().st_mtime_ns for path in drawn.iterdir()]
    assert [path.stat().st_mtime_ns for path in analysis.draw(tmp_path, 20_000, 8_000).iterdir()] == times


@pytest.mark.slow
def test_each_tool_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analysis.main(["--tokens", "40000", "--jobs", "1", "--folder", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["attribute", "whatif", "calibrate", "report"]
