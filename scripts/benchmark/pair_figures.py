"""Figures of whole runs in pairs, verl's own and corrected, from the file that ``paired_runs.py`` writes."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from scripts.harness import format_markdown

COLUMNS = ("pair", "verl's step, s", "corrected, s", "ratio", "verl's start, s", "corrected, s")
SIDES = ("verl", "corrected")
STUDENT_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Quantile of Student's t at 0.975 for 1, 2, ... degrees of freedom; that of 20 serves for more."""


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        settings: preset, steps and overrides.
        pair: number of its pair.
        side: one of ``SIDES``.
        start: seconds from the command to the end of the first step.
        seconds: ``timing_s/step`` of each step.
        phases: medians of the other ``timing_s/...`` that verl logs, by what follows the slash, without the first step.
    """

    settings: list[Any]
    pair: int
    side: str
    start: float
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


def compute_interval(values: Sequence[float]) -> Interval:
    """Compute the mean of independent values and its interval by Student's t; NaN bounds for a single one.

    Example:
        >>> compute_interval([1.0, 3.0])  # a standard error of 1, and 12.706 of them
        Interval(value=2.0, low=-10.706, high=14.706)
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Interval(mean, math.nan, math.nan)
    half = STUDENT_975[min(count - 1, len(STUDENT_975)) - 1] * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def pair_up(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """List the pairs of which both runs have ended, verl's first, by number."""
    verls, ours = ({run.pair: run for run in runs if run.side == side} for side in SIDES)
    return [(verls[pair], ours[pair]) for pair in sorted(verls.keys() & ours.keys())]


def compute_step(run: Run) -> float:
    """Compute the median of a run's steps without its first."""
    return statistics.median(run.seconds[1:])


def compare(runs: Sequence[Run]) -> dict[str, Interval]:
    """Compare the pairs: geometric mean of the ratios of steps, and mean of the differences of starts in seconds.

    Raises:
        ValueError: no pair is complete.
    """
    pairs = pair_up(runs)
    if not pairs:
        raise ValueError("no pair is complete: let both of its runs end.")
    ratios = compute_interval([math.log(compute_step(ours) / compute_step(verls)) for verls, ours in pairs])
    starts = compute_interval([ours.start - verls.start for verls, ours in pairs])
    return {"step ratio": Interval(*map(math.exp, ratios)), "start": starts}


def compare_phases(runs: Sequence[Run]) -> dict[str, tuple[float, Interval]]:
    """Compare what steps are made of: verl's mean seconds, and the mean of the pairs' differences; absent is 0 s."""
    pairs, found = pair_up(runs), {}
    for name in sorted({name for pair in pairs for run in pair for name in run.phases}):
        seconds = [[run.phases.get(name, 0.0) for run in pair] for pair in pairs]
        differences = compute_interval([ours - verls for verls, ours in seconds])
        found[name] = statistics.fmean(verls for verls, _ in seconds), differences
    return found


def format_result(runs: Sequence[Run]) -> str:
    """Format a row for each pair, and the comparison of all, with the phases that take a hundredth of a step."""
    rows, found = [], compare(runs)
    for verls, ours in pair_up(runs):
        one, other = compute_step(verls), compute_step(ours)
        figures = f"{one:.3f}", f"{other:.3f}", f"{other / one:.3f}", f"{verls.start:.1f}", f"{ours.start:.1f}"
        rows.append((ours.pair, *figures))
    ratio, start = found["step ratio"], found["start"]
    least = 0.01 * statistics.fmean(compute_step(verls) for verls, _ in pair_up(runs))
    phases = [
        f"{name}: verl's {verls:.3f} s, corrected {more.value:+.3f} s ({more.low:+.3f} to {more.high:+.3f})"
        for name, (verls, more) in compare_phases(runs).items()
        if max(verls, verls + more.value) >= least
    ]
    step = f"step, corrected over verl's own: {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    first = f"start to the end of the first step: {start.value:+.1f} s ({start.low:+.1f} to {start.high:+.1f})"
    return "\n".join([*format_markdown(COLUMNS, rows), step, first, *phases])


def read_runs(out: Path, settings: Sequence[Any]) -> list[Run]:
    """Read the runs of these settings that have ended; none where there is no file."""
    lines = out.read_text().splitlines() if out.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    return [run for run in runs if run.settings == list(settings)]
