"""The benchmark of the worker's loss runs, and its figures mean something; how good they are, no one asks here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "scripts" / "benchmark" / "worker_stage.py"
SIZES = {"rows": 3, "prompt": 2, "response": 4, "micro_batches": 2, "mini_batches": 3, "pairs": 2}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.extended
def test_the_worker_stage_is_timed(tmp_path: Path) -> None:
    sizes = [argument for name, value in SIZES.items() for argument in (f"--{name.replace('_', '-')}", str(value))]
    result = run("--model", "tiny", *sizes, "--shadow", "--json", str(tmp_path / "figures.json"))
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((tmp_path / "figures.json").read_text())
    share = found.pop("share_in_loss")
    assert {name: found.pop(name) for name in SIZES} == SIZES
    assert (found.pop("model"), found.pop("device"), found.pop("shadow")) == ("tiny", "cpu", True)
    assert set(found) == {"verl_seconds", "seconds", "verl_loss_seconds", "loss_seconds", "time_ratio"}
    assert all(value > 0 for value in found.values())
    extra = found["loss_seconds"] - found["verl_loss_seconds"]
    assert share == pytest.approx(extra / found["verl_seconds"])
    assert "with a correction" in result.stdout


@pytest.mark.slow
@pytest.mark.extended
def test_a_size_of_nothing_is_refused() -> None:
    result = run("--rows", "0")
    assert result.returncode == 2
    assert "--rows: 0: give a number of 1 or more" in result.stderr
