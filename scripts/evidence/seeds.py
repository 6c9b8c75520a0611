"""Code that all evidence shares: claims, plans of runs that can be resumed, and statistics and curves over seeds."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas
from numpy.typing import ArrayLike

from scripts import harness

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWS = 10_000
Run = TypeVar("Run", bound="Planned")


class ClaimError(AssertionError):
    """A claim does not hold; the message contains the claim's figures."""


def require(holds: bool, sentence: str) -> None:
    """Raise ClaimError with this sentence unless the claim holds."""
    if not holds:
        raise ClaimError(sentence)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run of a plan.

    Attributes:
        setting: name made of all settings except the seed; together with the seed, it is the key of the run's results.
        seconds: duration of the run on an idle machine.
        group: name by which several settings are selected together.
        details: text that ``--list`` shows.
    """

    setting: str
    seed: int
    seconds: int
    group: str = ""
    details: str = ""

    @property
    def name(self) -> str:
        """Name of the run, which is unique in the plan."""
        return f"{self.setting}-{self.seed}"


def build_parser(about: str | None) -> argparse.ArgumentParser:
    """Build the options of a command that executes the runs of a plan."""
    parser = harness.build_parser(about)
    parser.add_argument("names", nargs="*", help="of runs, or of what several have in common")
    parser.add_argument("--list", action="store_true", help="every run, whether it has finished, and its time")
    parser.add_argument("--hours", type=float, default=float("inf"), help="start no run that would end later")
    return parser


def make_runs(
    plan: Iterable[Run],
    finished: Mapping[tuple[str, int], str],
    make: Callable[[Run], str],
    options: argparse.Namespace,
    cores: str,
) -> None:
    """List the runs that the options select, or execute those that are unfinished, one after another.

    Args:
        finished: (setting, seed) -> how the run ended.
        make: makes a run, stores its results, and returns how the run ended.
        cores: number of cores that a run uses.

    Raises:
        SystemExit: a name matches no run.
    """
    named, wanted = {run: {run.group, run.setting, run.name} for run in plan}, set(options.names)
    if unknown := sorted(wanted.difference(*named.values())):
        sys.exit(f"{Path(sys.argv[0]).name}: {', '.join(unknown)}: unknown. Fix: use names that --list shows.")
    chosen = [run for run, names in named.items() if not wanted or wanted & names]
    left = [run for run in chosen if (run.setting, run.seed) not in finished]
    if options.list:
        for run in chosen:
            state = finished.get((run.setting, run.seed), f"{run.seconds} s")
            print(f"{run.name:26} {state:18} {run.details}".rstrip())
        hours = sum(run.seconds for run in left) / 3600
        print(f"{len(left)} of {len(chosen)} left, {hours:.1f} hours {cores}")
        return
    end = time.time() + 3600 * options.hours
    for run in left:
        if time.time() + run.seconds > end:
            break
        print(f"{run.name}: {make(run)}", flush=True)


def draw_means(rng: np.random.Generator, values: ArrayLike) -> np.ndarray:
    """Draw ``DRAWS`` bootstrap samples of the seeds, with replacement, and compute the mean of each."""
    found = np.asarray(values, dtype=float)
    means: np.ndarray = found[rng.integers(len(found), size=(DRAWS, len(found)))].mean(1)
    return means


def bootstrap(differences: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the mean, over ``DRAWS`` draws of seeds."""
    return find_percentiles(draw_means(np.random.default_rng(0), differences), confidence)


def find_percentiles(drawn: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the central interval that contains a share ``confidence`` of the drawn values."""
    edge = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [edge, 100 - edge])
    return float(low), float(high)


def sign_flip(differences: ArrayLike, *, two_sided: bool = True) -> float:
    """Compute p of the exact paired sign-flip test: the share of sign patterns whose mean is at least as large.

    In the one-sided test, only positive means count as large. With n pairs, p is at least 2 / 2^n in the two-sided
    test, and 1 / 2^n in the one-sided test.
    """
    found = np.asarray(differences, dtype=float)
    signs = 1.0 - 2.0 * (np.arange(2 ** len(found))[:, None] >> np.arange(len(found)) & 1)
    means, own = signs @ found / len(found), found.mean()
    if two_sided:
        means, own = np.abs(means), abs(own)
    # Patterns that tie with the observed pattern are counted, even if they differ by rounding because of the order of
    # summation.
    return float((means >= own - 1e-12).mean())


def equivalence(differences: ArrayLike, margin: float) -> float:
    """Compute the p value of equivalence within ``margin``: the larger of two one-sided sign-flip tests."""
    found = np.asarray(differences, dtype=float)
    return max(sign_flip(each, two_sided=False) for each in (found + margin, margin - found))


def cliffs_delta(one: ArrayLike, other: ArrayLike) -> float:
    """Compute Cliff's delta: the share of pairs in which ``one`` is larger minus the share in which it is smaller."""
    return float(np.sign(np.subtract.outer(np.asarray(one), np.asarray(other))).mean())


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust p values by Holm's step-down rule (Holm 1979): each p times the number of p values >= p, made monotone."""
    ordered = pandas.Series(p_values).sort_values(kind="stable")
    adjusted = (ordered * np.arange(len(ordered), 0, -1)).clip(upper=1.0).cummax()
    return {name: float(adjusted[name]) for name in p_values}


def page(scores: ArrayLike) -> float:
    """Compute the p value of a falling trend with Page's L test (Page 1963) and ``DRAWS`` permutations within seeds.

    Args:
        scores: (seeds, levels), outcomes that are expected to fall with the level.
    """
    ranks = pandas.DataFrame(np.asarray(scores, dtype=float)).rank(axis=1).to_numpy()
    levels = np.arange(ranks.shape[1], 0, -1)
    own = (ranks * levels).sum()
    shuffled = np.random.default_rng(0).permuted(np.broadcast_to(ranks, (DRAWS, *ranks.shape)), axis=2)
    return float((1 + ((shuffled * levels).sum((1, 2)) >= own - 1e-9).sum()) / (DRAWS + 1))


def draw_levels(
    axes: Axes, levels: Mapping[Any, Sequence[float]], ordered: Sequence[Any], middle: Any, **look: Any
) -> None:
    """Draw the mean or median of the seeds at each level as a line, and each seed as a point.

    Args:
        levels: level -> value of each seed.
        ordered: all levels in order; levels that are not in ``levels`` are omitted from the line.
        middle: function that computes the mean or the median, from numpy.
        look: colour and label of the line.
    """
    places = [ordered.index(level) for level in levels]
    axes.plot(places, [middle(each) for each in levels.values()], marker="o", **look)
    for place, each in zip(places, levels.values(), strict=True):
        axes.plot([place] * len(each), each, ".", color=look["color"], alpha=0.35)
