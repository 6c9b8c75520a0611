"""The analysis tools on a Ray cluster: the same result, and a worker that dies loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended]

RECORDING = ROOT / "tests" / "data" / "faults" / "held_out" / "colocate_async-14"
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

ray.init(num_cpus=2, include_dashboard=False)
try:
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "recipe.offpolicy.attribute", sys.argv[1], "--json"]
    alone, shared = (subprocess.check_output([*command, *more], text=True) for more in ([], ["--ray", address]))
    print("alike", alone == shared, len(alone))
    print("in order", list(Jobs(ray=address).map(partial(die_once, Path(sys.argv[2])), range(8))) == list(range(8)))
finally:
    ray.shutdown()
"""


def test_an_attribution_on_a_cluster_is_that_of_one_process(run_program: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "markers"
    folder.mkdir()
    done = run_program([sys.executable, "-c", PROGRAM, str(RECORDING), str(folder)], limit=300, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.output[-3000:]
    assert "alike True" in done.output
    assert "in order True" in done.output
    assert (folder / "3").exists()
