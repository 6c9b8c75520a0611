"""What benchmarks and evidence share: whole runs of the quickstart as a program, their metrics, and tables as text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.quickstart.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
UPDATED = "actor/grad_norm"
"""Key of the metrics of a step, as against those of a validation."""
Records = list[tuple[int, dict[str, Any]]]
"""(step, metrics) as verl's logger ``file`` writes them."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        code: its exit status; None: the time limit ended it.
        said: what it printed.
        folder: of its metrics and logs; None where it did not come so far.
        records: metrics, the 0th step's being those of the validation before training.
    """

    code: int | None
    said: str
    folder: Path | None
    records: Records


def run_quickstart(
    overrides: Sequence[str], log: Path, *, limit: float | None = None, environment: Mapping[str, str] = {}
) -> Ended:
    """Run scripts/quickstart.sh until it ends, or until this process or its time does.

    It takes VENV, by default the environment that runs this, and with it the variables that are given.
    """
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), *overrides]
    environment = {**os.environ, "VENV": os.environ.get("VENV") or sys.prefix, **environment}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
        code = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # the quickstart ends its own processes
                process.wait(60)
    said = log.read_text(errors="replace")
    found = re.search(r"everything goes to (\S+)", said)
    folder = ROOT / found[1] if found else None
    return Ended(code, said, folder, read_records(folder / "metrics.jsonl") if folder else [])


def read_records(path: Path) -> Records:
    """Read the metrics of a run; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line["step"], line["data"]) for line in map(json.loads, lines)]


def list_updates(records: Records) -> list[dict[str, Any]]:
    """List the metrics of the steps at which the policy was updated."""
    return [data for _, data in records if UPDATED in data]


def format_markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Format the lines of a table."""
    head, *body = (format_row(row) for row in (headings, *rows))
    return [head, f"|{'---|' * len(headings)}", *body]


def format_row(cells: Sequence[Any]) -> str:
    """Format one line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
