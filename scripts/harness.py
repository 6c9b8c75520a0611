"""Shared code of benchmarks and evidence: whole quickstart runs, timed calls, command-line options, and tables."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from scripts.quickstart.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
UPDATED = "actor/grad_norm"
"""Key that a step's metrics contain, but a validation's metrics do not."""
Records = list[tuple[int, dict[str, Any]]]
"""(step, metrics), as written by verl's logger ``file``."""
T = TypeVar("T")


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        code: exit status of the run; None if the run was ended because of its time limit.
        said: what the run printed.
        folder: folder with the run's metrics and logs; None if the run ended before creating one.
        records: metrics by step; those of step 0 are from the validation before training.
    """

    code: int | None
    said: str
    folder: Path | None
    records: Records

    @property
    def log(self) -> str:
        """The log of the training; empty if there is none."""
        path = self.folder / "train.log" if self.folder else None
        return path.read_text(errors="replace") if path and path.exists() else ""


def run_quickstart(
    overrides: Sequence[str], log: Path, *, limit: float | None = None, environment: Mapping[str, str] = {}
) -> Ended:
    """Run scripts/quickstart.sh until it ends, this process ends, or its time limit is reached.

    The run uses VENV, by default the environment that runs this process, and the given variables.
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # the quickstart ends its own processes
                process.wait(60)
    said = log.read_text(errors="replace")
    found = re.search(r"everything goes to (\S+)", said)
    folder = ROOT / found[1] if found else None
    return Ended(code, said, folder, read_records(folder / "metrics.jsonl") if folder else [])


def read_records(path: Path) -> Records:
    """Read the metrics of a run; empty if there is no such file."""
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


class Seconds(NamedTuple):
    """Seconds of one call: CPU time of this process, and wall time."""

    cpu: float
    wall: float


def time_call(call: Callable[[], Any]) -> Seconds:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int, *, uncounted: int = 1) -> dict[str, list[T]]:
    """Call each side once per round, in alternating order, so that all sides run under the same machine load.

    Args:
        uncounted: number of warm-up rounds, which are not measured; in these, sides import and compile.
    """
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(-uncounted, rounds):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            taken = sides[name]()
            if turn >= 0:
                found[name].append(taken)
    return found


def find_median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Find the median of the pairs' ratios."""
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def run_in_fresh_process(work: Callable[..., T], *arguments: Any, preload: Sequence[str] | None = None) -> T:
    """Run ``work`` in a separate process and return its result, so that measurements do not affect each other.

    Args:
        preload: modules that a server process imports without computing anything; the process is forked from this
            server. None to start a new Python.

    Raises:
        RuntimeError: the process ended without an answer, for example because it was killed for using too much memory.
    """
    context: Any = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    if preload is not None:
        context.set_forkserver_preload(list(preload))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise RuntimeError(f"{work.__name__}{arguments}: the process ended without an answer.") from error


def measure_growth(call: Callable[[], Any]) -> int:
    """Measure the peak increase, in bytes, of this process's resident set size during one call."""
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would be reused, unnoticed
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _read_status("VmRSS")
    call()
    return _read_status("VmHWM") - before


def _read_status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def list_processes(pid: int) -> list[psutil.Process]:
    """List a process and all processes that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def read_seconds(process: psutil.Process) -> float:
    """Read the CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """Build a parser that shows a module's docstring as its help."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_counts(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add options whose value is a number of 1 or more."""
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_read_count, default=value)


def _read_count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of 1 or more")
    return number
