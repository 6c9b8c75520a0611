"""The analysis tools with many processes and on a Ray cluster give the same result, even if a worker dies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import tools_on_ray
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended]

RECORDING = ROOT / "tests" / "data" / "faults" / "held_out" / "colocate_async-14"


def test_every_tool_gives_the_same_by_one_process_by_eight_and_on_a_cluster(
    run_program: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "markers"
    folder.mkdir()
    command = [sys.executable, tools_on_ray.__file__, str(RECORDING), str(folder)]
    # Workers begin at niceness 15, and next to other work for all cores would hardly run.
    done = run_program(command, limit=300, RAY_worker_niceness="0")
    assert done.returncode == 0, done.output[-3000:]
    assert "in order True" in done.output
    for tool in tools_on_ray.TOOLS:
        assert f"{tool} alike True True" in done.output
    assert (folder / "3").exists()
