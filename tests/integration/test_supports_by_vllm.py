"""Supports of a real vLLM engine are those of float32 Hugging Face, and mu is the softmax over them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.quickstart.options import CPU_ENVIRONMENT
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.verl("==0.9.1")]


def test_mu_is_the_softmax_over_the_support_that_is_returned(run_program: Callable[..., Any], tmp_path: Path) -> None:
    finished = run_program(
        [sys.executable, "-m", "tests.support.support_by_vllm", str(tmp_path / "model")],
        limit=400,
        cwd=ROOT,
        **CPU_ENVIRONMENT,
    )
    assert finished.returncode == 0, finished.output[-3000:]
    found = json.loads(next(line for line in finished.output.splitlines() if line.startswith('{"top_k"')))
    beyond = found.pop("more than are asked for")
    assert (beyond["known"], beyond["tokens"]) == (0, 240)
    for each in found.values():
        assert each["known"] > 0.5 * each["tokens"], found
        # A token at the edge may round to either side.
        assert each["alike"] >= 0.99 * each["known"], found
        assert each["outside"] == 0
        assert each["mass_error"] < 1e-5
        assert each["error"] < 1e-4, found
