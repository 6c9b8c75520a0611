"""Throughput of a what-if replay in tokens a second, reading included.

    python scripts/benchmark/whatif.py                    # draws 4 steps of a million tokens first
    python scripts/benchmark/whatif.py --recording DIR    # one of yours; --rounds 5, --json

Each round reads the recording alone and then replays every correction over it, so that all see the same load of the
machine; medians over rounds go to standard output, as JSON with --json. Beside each correction the replay measures what
acted and the uncorrected loss, as the command line does. The start of Python and torch is left out and printed apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from recordings import drawn_rows, record  # type: ignore[import-not-found]  # noqa: E402

from recipe.offpolicy.analysis.whatif.candidates import UNCORRECTED, Candidate, build_candidates  # noqa: E402
from recipe.offpolicy.analysis.whatif.study import run_study  # noqa: E402
from recipe.offpolicy.recording import Recording  # noqa: E402

CORRECTIONS = (
    "correction=tis_token",
    "correction=[tis_token,gsm]",
    "correction=tis_sequence",
    "correction=trl/opsm",
    "correction=skyrl/recommended",
    "correction=paper/m2po",
)
STEPS, ROWS, LONGEST = 4, 700, 8192

Seconds = tuple[float, float]
"""Of wall time and of CPU time of this process."""


def draw(directory: Path) -> None:
    """Draw steps of ``ROWS`` rows whose lengths are log-normal with a median of 1100 tokens."""
    for step in range(1, STEPS + 1):
        lengths = np.exp(np.random.default_rng(step).normal(7.0, 0.8, ROWS)).clip(8, LONGEST).astype(int)
        record(directory, drawn_rows(lengths.tolist(), seed=step, step=step, backend=0.02, drift=0.01))


def measure_time(work: Callable[[], int]) -> tuple[Seconds, int]:
    """Call ``work``; return its wall time in seconds and its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - wall, time.process_time() - cpu), result


def read(directory: Path) -> int:
    """Read every step; return the number of tokens."""
    return sum(step.rows.tokens for step in Recording(directory))


def replay(directory: Path, chosen: list[Candidate]) -> int:
    """Replay from the files to the measures; return the number of response tokens."""
    recording = Recording(directory)
    return run_study(recording, recording.steps, chosen).tokens


def seconds_to_start() -> float:
    command = [sys.executable, "-m", "recipe.offpolicy.whatif", "--help"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - start


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Measure medians over rounds, each of which runs everything once."""
    bare = Candidate(UNCORRECTED, UNCORRECTED)
    chosen = {name: [bare, *build_candidates([[name]], [], {})] for name in CORRECTIONS}
    chosen["all of these"] = [bare, *(one for several in list(chosen.values()) for one in several[1:])]
    reading: list[Seconds] = []
    replaying: dict[str, list[Seconds]] = {name: [] for name in chosen}
    tokens = 0
    for _ in range(rounds):
        reading.append(measure_time(partial(read, directory))[0])
        for name, corrections in chosen.items():
            seconds, tokens = measure_time(partial(replay, directory, corrections))
            replaying[name].append(seconds)
    return {
        "tokens": tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "start_seconds": seconds_to_start(),
        "read": _rate(reading, tokens),
        "replay": {name: _rate(seconds, tokens) for name, seconds in replaying.items()},
    }


def _rate(seconds: list[Seconds], tokens: int) -> dict[str, float]:
    wall, cpu = (statistics.median(one[clock] for one in seconds) for clock in range(2))
    return {
        "median_seconds": wall,
        "median_cpu_seconds": cpu,
        "tokens_a_second": tokens / wall,
        "tokens_a_cpu_second": tokens / cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, metavar="DIR", help="default: drawn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)  # as the command line
    with tempfile.TemporaryDirectory() as folder:
        if given.recording is None:
            draw(Path(folder))
        found = measure(given.recording or Path(folder), given.rounds)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['tokens']:,} tokens, {found['rounds']} rounds, start {found['start_seconds']:.1f} s")
    print("million tokens a second, of wall time and of CPU time:")
    for name, rate in {"reading alone": found["read"], **found["replay"]}.items():
        print(f"{name:32} {rate['tokens_a_second'] / 1e6:6.2f} {rate['tokens_a_cpu_second'] / 1e6:6.2f}")


if __name__ == "__main__":
    main()
