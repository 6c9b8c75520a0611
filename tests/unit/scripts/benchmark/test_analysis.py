"""The benchmark of the analysis tools at a small size: a row for each tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipe.offpolicy.recording import Recording
from scripts.benchmark import analysis


def test_a_recording_has_its_size(tmp_path: Path) -> None:
    analysis.draw(tmp_path, 20_000, 8_000)
    recording = Recording(tmp_path)
    assert recording.steps == [1, 2]
    assert sum(step.rows.tokens for step in recording) == 16_000


@pytest.mark.slow
@pytest.mark.extended
def test_each_tool_has_a_row(tmp_path: Path) -> None:
    """Of a recording that is removed in the end."""
    arguments = ("--tokens", "4000", "--step", "2000", "--folder", str(tmp_path / "drawn"), "--jobs", "1")
    command = [sys.executable, analysis.__file__, *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        [tool, "4e+03", "1"] for tool in ("attribute", "whatif", "calibrate", "report")
    ]
    assert all(float(row[-1]) > 100 for row in rows)  # torch alone takes as many MiB
    assert not list((tmp_path / "drawn").iterdir())
