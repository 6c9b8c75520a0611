"""What the benchmarks share: sides that take turns, clocks, fresh processes, and options of a command."""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from scripts.harness import format_markdown as format_markdown  # for all of them

T = TypeVar("T")


class Seconds(NamedTuple):
    """Of one call: CPU time of this process, and wall time."""

    cpu: float
    wall: float


def time_call(call: Callable[[], Any]) -> Seconds:
    """Time one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int, *, uncounted: int = 1) -> dict[str, list[T]]:
    """Call each side once a round, so that all see the same load of the machine; the first one is last in turn.

    Args:
        uncounted: rounds before those that count, which import and compile.
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
    """Return what ``work`` returns in a process of its own, so that one measurement leaves nothing behind for the next.

    Args:
        preload: modules of a server that has imported them and computed nothing, from which the process is forked;
            None: start Python again.

    Raises:
        RuntimeError: the process ended without an answer, as one does that is killed for its memory.
    """
    context: Any = multiprocessing.get_context("spawn" if preload is None else "forkserver")
    if preload is not None:
        context.set_forkserver_preload(list(preload))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise RuntimeError(f"{work.__name__}{arguments}: its process ended with no answer.") from error


def measure_growth(call: Callable[[], Any]) -> int:
    """Measure the bytes that this process's resident set grows by at most in one call."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again, unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _read_status("VmRSS")
    call()
    return _read_status("VmHWM") - before


def _read_status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def list_processes(pid: int) -> list[psutil.Process]:
    """List a process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def read_seconds(process: psutil.Process) -> float:
    """Read the CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """Build a parser whose help is the text of a module."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_counts(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add options that take a number of 1 or more."""
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_read_count, default=value)


def _read_count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of 1 or more")
    return number


def write_json(path: Path | None, found: Any) -> None:
    """Write figures to a file, if there is one."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")
