"""vLLM on a CUDA device returns the sampler's log-probs, each at its own token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_mu_is_the_trainers_log_prob_but_for_rounding(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "tests.support.mu_by_vllm", str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # vLLM logs there, too
    found = json.loads(line)
    assert found["device"] == "cuda"
    # On a CPU 0.042, 0.0017 and 2.1, with logits of a spread of several nats in bfloat16.
    assert found["same"] < 0.1
    assert found["k3"] < 0.01
    assert found["shifted"] > 10 * found["same"]
