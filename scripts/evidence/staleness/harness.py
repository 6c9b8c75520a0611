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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]  # this checkout's recipe, installed or not
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from rich.console import Console
from rich.table import Table
from seeds import ClaimError, draw_levels, draw_means, find_percentiles
from staleness.stale_training import ARMS, ETAS, RATES, STEPS, Run, train

from recipe.offpolicy.analysis.pages.plotting import create_axes, save

Scores = Mapping[tuple[str, float, float], Sequence[float]]
"""(arm, eta, rate) -> the score of each seed."""
CONFIDENCE = 0.9
MOST_OF_BYPASS, LEAST_OF_DECOUPLED = 0.5, 0.7
LOOKS = {
    "bypass": ("#d97706", "bypass: clip around mu"),
    "resampling": ("#7b8794", "resampling: pi_old recomputed, no weight"),
    "decoupled_ppo": ("#2563eb", "decoupled_ppo: pi_old recomputed, weight of cap 5"),
}
"""Arm -> its colour and label."""


class Ratio(NamedTuple):
    """Mean score of one setting over that of synchronous training at the same rate, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


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


def compute_ratio(scores: Sequence[float], synchronous: Sequence[float]) -> Ratio:
    """Compute the ratio of means with a percentile bootstrap over the seeds of both."""
    rng = np.random.default_rng(0)
    drawn = draw_means(rng, scores) / draw_means(rng, synchronous)
    return Ratio(float(np.mean(scores) / np.mean(synchronous)), *find_percentiles(drawn, CONFIDENCE))


def check_claims(scores: Scores, rates: Sequence[float]) -> list[str]:
    """Check that clipping around mu collapses at eta 8 and that decoupled PPO does not; return sentences.

    Raises:
        ClaimError: one of them does not hold over its whole interval.
    """
    claims = []
    for rate in rates:
        naive, decoupled = (
            compute_ratio(scores[arm, 8, rate], scores[arm, 0, rate]) for arm in ("bypass", "decoupled_ppo")
        )
        collapsed = f"bypass at eta 8 reaches {naive} of synchronous training, at most {MOST_OF_BYPASS}"
        kept = f"decoupled_ppo at eta 8 reaches {decoupled} of it, at least {LEAST_OF_DECOUPLED}"
        claims.append((naive.high <= MOST_OF_BYPASS, f"rate {rate:g}: {collapsed}"))
        claims.append((decoupled.low >= LEAST_OF_DECOUPLED, f"rate {rate:g}: {kept}"))
    if broken := [sentence for holds, sentence in claims if not holds]:
        raise ClaimError("; ".join(broken))
    return [sentence for _, sentence in claims]


def describe_one_step_behind(scores: Scores, rates: Sequence[float]) -> list[str]:
    """Say whether "naive eta = 1 degraded" reproduces: only where the whole interval lies below 1."""
    sentences = []
    for rate in rates:
        found = compute_ratio(scores["bypass", 1, rate], scores["bypass", 0, rate])
        shown = "reproduces" if found.high < 1 else "does not reproduce"
        sentences.append(f'rate {rate:g}: "naive eta = 1 degraded" {shown}: {found} of synchronous training')
    return sentences


def report(scores: Scores, console: Console) -> None:
    """Print a table a rate: mean score, and in brackets its share of synchronous training with the interval."""
    for rate in RATES:
        table = Table(title=f"Mean reward after {STEPS} steps, learning rate {rate:g}", title_justify="left")
        table.add_column("correction")
        for eta in ETAS:
            table.add_column("no bound" if math.isinf(eta) else f"eta {eta:g}", justify="right", no_wrap=True)
        for arm in ARMS:
            found = {eta: scores[arm, eta, rate] for eta in ETAS}
            shares = {eta: f"\n{compute_ratio(each, found[0])}" if eta else "" for eta, each in found.items()}
            table.add_row(arm, *(f"{sum(each) / len(each):.2f}{shares[eta]}" for eta, each in found.items()))
        console.print(table)


def draw(scores: Scores, rates: Sequence[float], path: Path) -> None:
    """Write a PNG, a panel a rate. Lines are means over seeds, points the seeds."""
    figure, panels = create_axes(1, len(rates), width=5 * len(rates), height=4.4, sharey=True)
    for axes, rate in zip(panels, rates, strict=True):
        for arm, (colour, label) in LOOKS.items():
            levels = {eta: scores[arm, eta, rate] for eta in ETAS}
            draw_levels(axes, levels, ETAS, np.mean, color=colour, label=label)
        axes.set_xticks(range(len(ETAS)), ["none" if math.isinf(eta) else f"{eta:g}" for eta in ETAS])
        axes.set(title=f"Learning rate {rate:g}", xlabel="eta: batches that sampling is ahead by", ylim=(0, 1))
    panels[0].set_ylabel(f"mean reward after {STEPS} steps")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    save(figure, path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
