"""Measures time and memory of the analysis tools for recordings of several sizes.

    python scripts/benchmark/analysis.py                              # 1e6 and 1e7 tokens, one process and all cores
    python scripts/benchmark/analysis.py --tokens 1e8 1e9 --jobs 1 8  # 12 GB of disk for 1e9
    python scripts/benchmark/analysis.py --tokens 4e6 --step 4e6 --ranks 16 --jobs 1    # one large step

Each recording is generated in --folder, in steps of a quarter of a million tokens and at three million tokens per
second, and is removed after the tools have read it. The tools run as commands, so their times include the start of
Python; each tool runs once with each value of --jobs. Memory is the largest total of a tool's processes, with shared
pages counted once (PSS); memory and CPU time are sampled five times a second.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from recordings import drawn_rows, record  # type: ignore[import-not-found]

from scripts.harness import build_parser, format_markdown, format_row, list_processes, read_seconds

STEP = 250_000
TOOLS: dict[str, tuple[str, ...]] = {
    "attribute": (),
    "whatif": ("--spec", "correction=[tis_token,gsm]"),
    "calibrate": ("--spec", "correction=[tis_token,gsm]", "--target-kept", "0.98"),
    "report": (),
}
COLUMNS = ("tool", "tokens", "jobs", "wall, s", "CPU, s", "tokens a second", "memory, MiB")
PAUSE = 0.2
"""Seconds between samples of a tool's usage."""


def draw(directory: Path, tokens: int, step_tokens: int = STEP, *, ranks: int = 1) -> None:
    """Draw a recording of this many tokens: rows of 500, in groups of 8, a quarter of them stale.

    Args:
        ranks: number of files per step.
    """
    rows = max(min(tokens, step_tokens) // 500 // ranks, 8)
    for step, rank in itertools.product(range(1, max(tokens // step_tokens, 1) + 1), range(ranks)):
        ages = (np.arange(rows) % 4 == 0) * min(step - 1, 1)
        part = {"seed": step + 2**32 * rank, "step": step, "rank": rank, "group": 8, "backend": 0.02, "drift": 0.01}
        uids = np.array([f"{step}-{rank}-{row // 8}" for row in range(rows)], dtype=object)
        record(directory, drawn_rows([500] * rows, oldest_version=step - 1 - ages, uid=uids, **part))


def measure(tool: str, directory: Path, jobs: int) -> tuple[float, float, float]:
    """Run one tool; return its wall time and CPU time in seconds, and the memory of all its processes in MiB."""
    command = [sys.executable, "-m", f"recipe.offpolicy.{tool}", str(directory), *TOOLS[tool], "--jobs", str(jobs)]
    # The page is written next to the recording, because it replaces any existing file, even /dev/null.
    command += ["--out", str(directory.with_suffix(".html"))] if tool == "report" else ["--json"]
    began, memory = time.perf_counter(), 0
    seconds: dict[int, float] = {}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with suppress(psutil.Error):  # a process ended in between
            held = 0
            for each in list_processes(process.pid):
                seconds[each.pid] = read_seconds(each)
                held += each.memory_full_info().pss
            memory = max(memory, held)
        time.sleep(PAUSE)
    # Status 1 means that a bound was not found or that a replay differs; the tool has not failed.
    if process.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)}: ended with {process.returncode}.")
    return time.perf_counter() - began, sum(seconds.values()), memory / 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and measure; return the exit status."""
    parser = build_parser(__doc__)
    parser.add_argument("--tokens", nargs="+", type=float, default=[1e6, 1e7])
    parser.add_argument("--jobs", nargs="+", type=int, default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--step", type=float, default=STEP, help="tokens of a step")
    parser.add_argument("--ranks", type=int, default=1, help="files of a step")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "benchmark_analysis")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=[*TOOLS])
    options = parser.parse_args(arguments)
    print("\n".join(format_markdown(COLUMNS, [])))
    for tokens in map(int, options.tokens):
        directory = options.folder / f"tokens_{tokens}_step_{options.step:.0f}_ranks_{options.ranks}"
        try:
            draw(directory, tokens, int(options.step), ranks=options.ranks)
            for tool, jobs in itertools.product(options.tools, options.jobs):
                wall, cpu, memory = measure(tool, directory, jobs)
                figures = (f"{wall:.1f}", f"{cpu:.1f}", f"{tokens / wall:.2e}", f"{memory:.0f}")
                print(format_row((tool, f"{tokens:.0e}", jobs, *figures)), flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            directory.with_suffix(".html").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
