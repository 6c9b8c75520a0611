"""The benchmark of the analysis tools at a small size: a row for each tool, and a recording that is drawn once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipe.offpolicy.recording import Recording
from scripts.benchmark import analysis
from tests.support.recordings import same


def test_a_recording_has_its_size_and_is_drawn_once(tmp_path: Path) -> None:
    analysis.draw(tmp_path, 20_000, 8_000)
    recording = Recording(tmp_path)
    assert recording.steps == [1, 2]
    assert sum(step.rows.tokens for step in recording) == 16_000
    times = [path.stat().st_mtime_ns for path in tmp_path.iterdir()]
    analysis.draw(tmp_path, 20_000, 8_000)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == times


def test_a_step_is_shared_by_ranks(tmp_path: Path) -> None:
    analysis.draw(tmp_path, 8_000, 8_000, ranks=2)
    one, other = (part.rows for part in Recording(tmp_path).parts(1))
    assert one.tokens == other.tokens == 4_000
    assert [set(part.rank) for part in (one, other)] == [{0}, {1}]
    assert not np.array_equal(one.response_ids, other.response_ids)


@pytest.mark.slow
@pytest.mark.extended
def test_each_tool_has_a_row(tmp_path: Path) -> None:
    """Of a recording that several processes draw, as one does, and that is removed in the end."""
    tokens, step = 2_000 * analysis.LEAST, 2_000

    def measure(*more: str) -> list[list[str]]:
        arguments = ("--tokens", str(tokens), "--step", str(step), "--folder", str(tmp_path / "drawn"), *more)
        command = [sys.executable, analysis.__file__, *arguments]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed.splitlines()[2:]]

    assert [row[:3] for row in measure("--jobs", "1", "2", "--tools", "attribute", "--keep")] == [
        ["attribute", "4e+04", "1"],
        ["attribute", "4e+04", "2"],
    ]
    analysis.draw(tmp_path / "alone", 4_000, step)
    (drawn,) = (tmp_path / "drawn").iterdir()
    shared, alone = Recording(drawn), Recording(tmp_path / "alone")
    assert len(shared.steps) == analysis.LEAST
    assert all(same(alone.step(number).rows, shared.step(number).rows) for number in alone.steps)
    rows = measure("--jobs", "1")
    assert [row[0] for row in rows] == ["attribute", "whatif", "calibrate", "report"]
    assert all(float(row[-1]) > 100 for row in rows)  # torch alone takes as many MiB
    assert not list((tmp_path / "drawn").iterdir())
