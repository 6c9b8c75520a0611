"""Throughput of a what-if replay in tokens a second, reading included.

    python scripts/benchmark/whatif.py                    # draws 4 steps of a million tokens first
    python scripts/benchmark/whatif.py --recording DIR    # one of yours; --rounds 5, --json

Each round reads the recording alone and then replays every correction over it, so that all see the same load of the
machine; medians over rounds go to standard output, as JSON with --json. For each correction the replay measures what
acted and the uncorrected loss, as the command line does. The start of Python and torch is left out and printed apart.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from recordings import drawn_rows, record  # type: ignore[import-not-found]

from recipe.offpolicy.analysis.whatif.candidates import UNCORRECTED, Candidate, build_candidates
from recipe.offpolicy.analysis.whatif.study import run_study
from recipe.offpolicy.recording import Recording
from scripts.benchmark.timing import Seconds, add_counts, build_parser, take_turns, time_call

CORRECTIONS = (
    "correction=tis_token",
    "correction=[tis_token,gsm]",
    "correction=tis_sequence",
    "correction=trl/opsm",
    "correction=skyrl/recommended",
    "correction=paper/m2po",
)
STEPS, ROWS, LONGEST = 4, 700, 8192


def draw(directory: Path) -> None:
    """Draw steps of ``ROWS`` rows whose lengths are log-normal with a median of 1100 tokens."""
    for step in range(1, STEPS + 1):
        lengths = np.exp(np.random.default_rng(step).normal(7.0, 0.8, ROWS)).clip(8, LONGEST).astype(int)
        record(directory, drawn_rows(lengths.tolist(), seed=step, step=step, backend=0.02, drift=0.01))


def count_tokens(directory: Path) -> int:
    """Read every step; return the number of tokens."""
    return sum(step.rows.tokens for step in Recording(directory))


def replay(directory: Path, chosen: list[Candidate]) -> None:
    """Replay from the files to the measures."""
    recording = Recording(directory)
    run_study(recording, recording.steps, chosen)


def seconds_to_start() -> float:
    command = [sys.executable, "-m", "recipe.offpolicy.whatif", "--help"]
    return time_call(partial(subprocess.run, command, check=True, capture_output=True, cwd=ROOT)).wall


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Measure medians over rounds, each of which runs everything once."""
    bare = Candidate(UNCORRECTED, UNCORRECTED)
    chosen = {name: [bare, *build_candidates([[name]], [], {})] for name in CORRECTIONS}
    chosen["all of these"] = [bare, *(one for several in list(chosen.values()) for one in several[1:])]
    replays = {name: partial(time_call, partial(replay, directory, each)) for name, each in chosen.items()}
    reading = {"read": partial(time_call, partial(count_tokens, directory))}
    seconds = take_turns(reading | replays, rounds, uncounted=0)
    tokens = count_tokens(directory)
    rates = {name: _rate(taken, tokens) for name, taken in seconds.items()}
    return {
        "tokens": tokens,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "start_seconds": seconds_to_start(),
        "read": rates.pop("read"),
        "replay": rates,
    }


def _rate(seconds: Sequence[Seconds], tokens: int) -> dict[str, float]:
    cpu, wall = map(statistics.median, zip(*seconds, strict=True))
    return {
        "median_seconds": wall,
        "median_cpu_seconds": cpu,
        "tokens_a_second": tokens / wall,
        "tokens_a_cpu_second": tokens / cpu,
    }


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--recording", type=Path, metavar="DIR", help="default: drawn")
    add_counts(parser, rounds=5)
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
