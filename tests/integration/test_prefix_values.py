"""A real vLLM engine computes the same values as float32 Hugging Face, with and without its prefix cache."""

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


def test_values_are_right_to_1e_4_whatever_the_cache_holds(run_program: Callable[..., Any], tmp_path: Path) -> None:
    """Each row is scored twice; the second time, the cache contains the answer itself."""
    finished = run_program(
        [sys.executable, "-m", "tests.support.score_by_vllm", str(tmp_path / "model")],
        limit=400,
        cwd=ROOT,
        **CPU_ENVIRONMENT,
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    assert finished.returncode == 0, finished.output[-3000:]
    found = json.loads(next(line for line in finished.output.splitlines() if line.startswith('{"auto"')))
    assert all(each["error"] < 1e-4 for each in found.values()), found
    assert found["auto"]["cached_share"] > 0.2
    assert found["auto"]["rescored"] > 0
    assert (found["off"]["cached_share"], found["off"]["rescored"]) == (0.0, 0)
