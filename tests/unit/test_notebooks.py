"""The notebooks run from top to bottom in less than two minutes, and end with a correction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FAULTS = ROOT / "tests" / "data" / "faults" / "held_out"


def execute(notebook: Path, **variables: str) -> list[str]:
    """Return the lines that all code cells print, run in one process in the notebook's folder."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=notebook.parent, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("recording", "chosen"),
    [
        ("", "'+correction@correction=opsm' 'correction.masks.opsm.delta=0.1'"),
        pytest.param(
            "healthy-10",
            "'+correction@correction=[tis_token,gsm]' 'correction.masks.gsm.lower=0.9821' "
            "'correction.masks.gsm.upper=1.0182'",
            marks=pytest.mark.extended,
        ),
    ],
    ids=["stale", "healthy"],
)
@pytest.mark.slow
def test_it_ends_with_a_correction(recording: str, chosen: str) -> None:
    variables = {"RECORDING": str(FAULTS / recording)} if recording else {}
    printed = execute(ROOT / "examples" / "choose_a_correction.ipynb", **variables)
    assert printed[-1] == f"python -m verl.trainer.main_ppo ... {chosen}"
