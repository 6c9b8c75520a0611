"""Quickstarts as tests run them: Ray, verl's trainer, FSDP2 or Megatron, and vLLM, one run at a time."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIMIT = 420.0
"""Seconds that a run may take; most take 80 to 150."""


@dataclass(frozen=True)
class Trained:
    """A run that has ended.

    Attributes:
        returncode: of the quickstart; 1: training failed by itself.
        output: what it printed.
        log: the whole of the training's log.
        steps: the metrics of every step that was logged.
    """

    returncode: int
    output: str
    log: str
    steps: list[dict[str, Any]]


def train(run_program: Callable[..., Any], *overrides: str, **environment: str) -> Trained:
    """One quickstart with these Hydra overrides, which must end by itself within ``LIMIT``.

    Its held-out score is of an eighth of the questions: nobody judges it.
    """
    finished = run_program(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), "data.val_max_samples=32", *overrides],
        limit=LIMIT,
        cwd=ROOT,
        VENV=os.environ.get("VENV") or sys.prefix,
        **environment,
    )
    assert not finished.timed_out, finished.output[-3000:]
    found = re.search(r"everything goes to (\S+)", finished.output)
    assert found, finished.output[-3000:]
    folder = ROOT / found.group(1)
    metrics, log = folder / "metrics.jsonl", folder / "train.log"
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    steps = [record for record in records if "actor/grad_norm" in record]
    return Trained(finished.returncode, finished.output, log.read_text() if log.is_file() else "", steps)


def trained(run_program: Callable[..., Any], *overrides: str) -> list[dict[str, Any]]:
    """The metrics of the steps of a run that must end well."""
    run = train(run_program, *overrides)
    assert run.returncode == 0, run.output[-3000:]
    return run.steps


def broken(run_program: Callable[..., Any], fault: str, *overrides: str) -> Trained:
    """A run with a fault of ``faults.py`` in it, which must end with the error of its training."""
    run = train(
        run_program,
        "trainer.val_before_train=false",
        *overrides,
        OFFPOLICY_FAULT=fault,
        VERL_USE_EXTERNAL_MODULES="verl_patches.cpu,faults",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    )
    # 5 and 6 are limits of the quickstart itself.
    assert run.returncode == 1, run.output[-3000:]
    return run
