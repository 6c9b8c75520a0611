"""A reader that closes the pipe, such as `head`, is no failure of the doctor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--json", "--module", "no.such.program"], 2), (["--module", "no.such.program"], 2), (["--help"], 0)],
)
def test_a_closed_pipe_is_quiet(arguments: list[str], status: int, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "recipe.offpolicy.doctor", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode in (status, 141)  # 128 + SIGPIPE, as of the other tools
    for word in ("Broken", "Traceback", "Internal error in the doctor", "Exception ignored"):
        assert word not in done.stderr
