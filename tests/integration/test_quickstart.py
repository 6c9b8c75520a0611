"""The two promises of the quickstart, on the whole system: the score rises, and an interrupt leaves nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ["bash", str(ROOT / "scripts" / "quickstart.sh")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


def environment() -> dict[str, str]:
    return {"VENV": os.environ.get("VENV") or sys.prefix}


def test_default_run_improves_the_model(run_program: Callable[..., Any]) -> None:
    finished = run_program(QUICKSTART, limit=600.0, cwd=ROOT, **environment())
    assert finished.returncode == 0, finished.output[-3000:]
    before, after = (
        float(score)
        for score in re.findall(r"held-out score (?:before training|after step \d+): ([\d.]+)", finished.output)
    )
    assert 0.1 <= before <= 0.6
    assert after - before >= 0.1
    assert "proved live" in finished.output
    picture = re.search(r"picture: (\S+)", finished.output)
    assert picture
    assert (ROOT / picture.group(1)).read_bytes()[:4] == b"\x89PNG"
    steps = [int(step) for step in re.findall(r"step (\d+) of \d+: reward", finished.output)]
    assert steps == list(range(1, len(steps) + 1))
    stamps = [int(stamp) for stamp in re.findall(r"^\[ *(\d+) s\]", finished.output, flags=re.MULTILINE)]
    assert max(later - earlier for earlier, later in pairwise(stamps)) < 60  # never silent


def test_an_interrupt_while_engines_start_leaves_nothing(run_program: Callable[..., Any]) -> None:
    """The limit sends SIGINT in the midst of Ray's and vLLM's start; run_program looks for what was left."""
    finished = run_program(QUICKSTART, limit=75.0, cwd=ROOT, **environment())
    assert finished.timed_out
    assert finished.returncode == 130
    assert "starting Ray and vLLM" in finished.output
    assert "no process is left" in finished.output
