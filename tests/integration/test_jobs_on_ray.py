"""The analysis tools on a Ray cluster: the same result, and a worker that dies loses nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended]

RECORDING = ROOT / "tests" / "data" / "faults" / "held_out" / "colocate_async-14"
TOOLS = {
    "attribute": ["--json"],
    "whatif": ["--spec", "correction=[tis_token,gsm]", "--json"],
    "calibrate": ["--spec", "correction=[tis_token,gsm]", "--target-kept", "0.98", "--target-ess", "0.9", "--json"],
    "report": ["--out", "report.html"],
}
PROGRAM = """
import json, os, signal, subprocess, sys
from functools import partial
from pathlib import Path

import ray

from recipe.offpolicy.analysis.jobs import Jobs

def die_once(folder, number):
    marker = folder / str(number)
    if number == 3 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number

def run(tool, arguments, *more):
    command = [sys.executable, "-m", f"recipe.offpolicy.{tool}", recording, *arguments, *more]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder).stdout
    return (folder / "report.html").read_text() if tool == "report" else text

recording, folder, tools = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
ray.init(num_cpus=2, include_dashboard=False)
try:
    address = ray.get_runtime_context().gcs_address
    for tool, arguments in tools.items():
        alone, shared = run(tool, arguments), run(tool, arguments, "--ray", address)
        print(tool, "alike", alone == shared, len(alone) > 1000)
    print("in order", list(Jobs(ray=address).map(partial(die_once, folder), range(8))) == list(range(8)))
finally:
    ray.shutdown()
"""


def test_every_tool_on_a_cluster_gives_what_one_process_does(run_program: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "markers"
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(RECORDING), str(folder), json.dumps(TOOLS)]
    done = run_program(command, limit=600, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.output[-3000:]
    for tool in TOOLS:
        assert f"{tool} alike True True" in done.output
    assert "in order True" in done.output
    assert (folder / "3").exists()
