"""What staleness costs, with and without a correction: a small policy trained on samples that are eta steps old.

    python scripts/evidence/staleness/harness.py [--seeds 5] [--processes 2] [--out outputs/staleness.png]

Trains with each of three shipped corrections at eta 0, 1, 2, 4, 8, 16 and without a bound, at two learning rates; about
ten minutes on two cores. Prints scores with intervals, draws them, asserts that clipping around mu collapses at eta 8
where decoupled PPO does not, and exits with 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]  # this checkout's recipe, installed or not
os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from staleness.stale_claims import ClaimError, Scores, check_claims, compute_ratio, describe_one_step_behind  # noqa: E402
from staleness.stale_figure import draw  # noqa: E402
from staleness.stale_training import ARMS, ETAS, RATES, STEPS, Run, train  # noqa: E402


def list_runs(seeds: int) -> Iterator[Run]:
    """List all runs; at eta 0 mu is pi_old and all arms are one."""
    for seed in range(seeds):
        for rate in RATES:
            yield Run(ARMS[0], 0, rate, seed)
            yield from (Run(arm, eta, rate, seed) for arm in ARMS for eta in ETAS if eta)


def measure(seeds: int, processes: int, steps: int = STEPS) -> Scores:
    """Train all runs and collect the scores of each setting."""
    runs = list(list_runs(seeds))
    scores: dict[tuple[str, float, float], list[float]] = {}
    with ProcessPoolExecutor(processes) as pool:
        for run, score in zip(runs, pool.map(train, runs, [steps] * len(runs)), strict=True):
            for arm in (run.arm,) if run.eta else ARMS:
                scores.setdefault((arm, run.eta, run.rate), []).append(score)
    return scores


def report(scores: Scores, console: Console) -> None:
    """Print a table a rate: mean score, and in brackets its share of synchronous training with the interval."""
    for rate in RATES:
        table = Table(title=f"Mean reward after {STEPS} steps, learning rate {rate:g}", title_justify="left")
        table.add_column("correction")
        for eta in ETAS:
            table.add_column("no bound" if math.isinf(eta) else f"eta {eta:g}", justify="right", no_wrap=True)
        for arm in ARMS:
            cells = []
            for eta in ETAS:
                found = scores[arm, eta, rate]
                share = compute_ratio(found, scores[arm, 0, rate])
                cells.append(f"{sum(found) / len(found):.2f}" + (f"\n{share}" if eta else ""))
            table.add_row(arm, *cells)
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "staleness.png")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.processes < 1:
        parser.error("--seeds and --processes take a whole number from 1 on.")
    scores = measure(options.seeds, options.processes)
    console = Console(width=160)
    report(scores, console)
    draw(scores, RATES, options.out)
    console.print(f"picture: {os.path.relpath(options.out)}", highlight=False)
    for sentence in describe_one_step_behind(scores, RATES):
        console.print(sentence, highlight=False)
    try:
        for sentence in check_claims(scores, RATES):
            console.print(f"holds: {sentence}", highlight=False)
    except ClaimError as error:
        console.print(f"DOES NOT HOLD: {error}", highlight=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
