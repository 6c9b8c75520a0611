"""The training part of scripts/gpu.sh, run on a CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.extended
def test_its_training_is_proved(run_program: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = ["bash", str(ROOT / "scripts" / "gpu.sh"), "--dry-run", "--only", "training", "--out", str(out)]
    done = run_program(command, limit=900, VENV=sys.prefix, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.output[-3000:]
    figures = json.loads(out.read_text())["parts"]["training"]["figures"]
    assert (figures["proved"], len(figures["step_seconds"])) == (1.0, 2)
    assert figures["last_kl_k3"] > 0
