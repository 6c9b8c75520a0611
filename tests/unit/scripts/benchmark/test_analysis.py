"""The benchmark of the analysis tools at a small size: a row for each tool, and a recording that is drawn once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.offpolicy.recording import Recording
from tests.support.paths import ROOT
from tests.support.recordings import same

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
def test_each_tool_has_a_row(tmp_path: Path) -> None:
    """Of a recording that several processes draw, as one does."""
    tokens, step = 2_000 * analysis.LEAST, 2_000
    arguments = ("--tokens", str(tokens), "--step", str(step), "--jobs", "1", "--folder", str(tmp_path))
    command = [sys.executable, analysis.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [tool, "4e+04", "1"] for tool in ("attribute", "whatif", "calibrate", "report")
    ]
    assert all(float(row[-1]) > 100 for row in rows)  # torch alone takes as many MiB
    shared, alone = Recording(tmp_path / f"tokens_{tokens}"), Recording(analysis.draw(tmp_path / "alone", 4_000, step))
    assert len(shared.steps) == analysis.LEAST
    assert all(same(alone.step(number).rows, shared.step(number).rows) for number in alone.steps)
