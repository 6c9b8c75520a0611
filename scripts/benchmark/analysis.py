"""Time and memory of the analysis tools by the size of a recording.

    python scripts/benchmark/analysis.py                              # 1e6 and 1e7 tokens, one process and all cores
    python scripts/benchmark/analysis.py --tokens 1e8 1e9 --jobs 8    # 12 GB of disk for 1e9

Each recording is drawn once, in steps of a quarter of a million tokens, and kept in --folder. Tools run as commands do,
the start of Python included; memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from recordings import drawn_rows, record  # type: ignore[import-not-found]  # noqa: E402

STEP = 250_000
TOOLS: dict[str, tuple[str, ...]] = {
    "attribute": (),
    "whatif": ("--spec", "correction=[tis_token,gsm]"),
    "calibrate": ("--spec", "correction=[tis_token,gsm]", "--target-kept", "0.98"),
    "report": (),
}
SHARED = ("attribute", "whatif")
"""Tools that take ``--jobs``."""


def draw(folder: Path, tokens: int, step_tokens: int = STEP) -> Path:
    """Draw a recording of so many tokens, rows of 500 in groups of 8, a quarter of them stale; kept if it is there."""
    directory = folder / f"tokens_{tokens}"
    for step in range(1, max(tokens // step_tokens, 1) + 1):
        rows = max(min(tokens, step_tokens) // 500, 8)
        ages = (np.arange(rows) % 4 == 0) * min(step - 1, 1)
        part = {"seed": step, "step": step, "group": 8, "backend": 0.02, "drift": 0.01}
        if not list(directory.glob(f"step_{step:08d}.*")):
            record(directory, drawn_rows([500] * rows, oldest_version=step - 1 - ages, **part))
    return directory


def measure(tool: str, directory: Path, jobs: int | None) -> tuple[float, float, float]:
    """Run one tool; return seconds of wall time, of CPU time, and MiB of the largest process."""
    command = [sys.executable, "-m", f"recipe.offpolicy.{tool}", str(directory), *TOOLS[tool]]
    command += ["--jobs", str(jobs)] if jobs and tool in SHARED else []
    # Beside the recording: a page takes the place of what is there, of /dev/null too.
    command += ["--out", str(directory.with_suffix(".html"))] if tool == "report" else ["--json"]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)}: ended with {os.waitstatus_to_exitcode(status)}.")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and measure; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", nargs="+", type=float, default=[1e6, 1e7])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "benchmark_analysis")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=[*TOOLS])
    options = parser.parse_args(arguments)
    print("| tool | tokens | jobs | wall, s | CPU, s | tokens a second | largest process, MiB |")
    print("|---|---|---|---|---|---|---|")
    for tokens in map(int, options.tokens):
        directory = draw(options.folder, tokens)
        for tool in options.tools:
            for jobs in sorted({1, options.jobs}) if tool in SHARED else (1,):
                wall, cpu, memory = measure(tool, directory, jobs)
                print(
                    f"| {tool} | {tokens:.0e} | {jobs} | {wall:.1f} | {cpu:.1f} | {tokens / wall:.2e} | {memory:.0f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
