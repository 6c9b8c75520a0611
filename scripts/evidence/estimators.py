"""Bias and variance of each correction's policy gradient, by exact enumeration of a small policy.

    python scripts/evidence/estimators.py [--seed 0] [--out outputs/estimators.png]

Prints bias, cosine and variance of every estimator's gradient against the true one at several mismatches, the bias
under staleness, and keep-rates by length; asserts what holds exactly, and exits with 1 where something does not.
The corrections are those of ``recipe.offpolicy.correction``. Nothing is sampled but the simulated keep-rates.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout's recipe, installed or not

import keep_rates
import torch
from estimator_catalogue import ESTIMATORS, NONE
from estimator_claims import ClaimError
from estimator_evidence import Evidence, EvidenceSettings, collect
from estimator_figure import draw
from expectation import Measurement
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
Rows = dict[float, dict[str, Measurement]]
WIDTH = 120


def report(evidence: Evidence, console: Console) -> None:
    """Format all tables and sentences."""
    settings, unit = evidence.settings, evidence.on_policy_variance
    at_old = f"pi = pi_old, by mismatch (V = {settings.vocabulary}, T = {settings.length})"
    at_stale = f"mismatch {settings.stale_mismatch:g}, by staleness of pi"
    for title, rows, cell in (
        (f"Bias |E[g] - grad J| / |grad J|; {at_old}", evidence.mismatches, bias),
        (f"Cosine of E[g] and grad J; {at_old}", evidence.mismatches, cosine),
        (
            f"Variance of one row's gradient, 1 = on-policy; {at_old}",
            evidence.mismatches,
            lambda m: f"{m.variance / unit:.2f}",
        ),
        (
            f"Score mean |E[sum_t w_t grad log pi_t]|, 0 = baselines add no bias; {at_old}",
            evidence.mismatches,
            lambda m: number(m.score_mean),
        ),
        (f"Bias; {at_stale}", evidence.stalenesses, bias),
    ):
        console.print(_by_level(title, rows, cell))
    console.print(_summary(evidence))
    console.print(_worlds(evidence))
    console.print(_keep_rates(evidence))
    for sentence in evidence.sentences:
        console.print(f"holds: {sentence}", highlight=False)


def number(value: float) -> str:
    """Format with two digits; rounding errors as 0."""
    return "0" if value < 1e-10 else f"{value:.2g}"


def bias(measurement: Measurement) -> str:
    return number(measurement.bias)


def cosine(measurement: Measurement) -> str:
    return "-" if math.isnan(measurement.cosine) else f"{measurement.cosine:.3f}"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _by_level(title: str, rows: Rows, cell: Callable[[Measurement], str]) -> Table:
    table = _table(title, ["estimator"], [f"{level:g}" for level in rows])
    for estimator in ESTIMATORS:
        table.add_row(estimator.name, *(cell(row[estimator.name]) for row in rows.values()))
    return table


def _summary(evidence: Evidence) -> Table:
    """Format the results at one mismatch in full."""
    plane = evidence.settings.plane
    headings = ["bias", "cosine", "variance", "score mean", "removed", "rows"]
    title = f"pi = pi_old at mismatch {plane:g}; removed: share of tokens; rows: batch whose standard error is the bias"
    table = _table(title, ["estimator"], headings)
    for estimator in ESTIMATORS:
        m = evidence.mismatches[plane][estimator.name]
        table.add_row(
            estimator.name,
            bias(m),
            cosine(m),
            f"{m.variance / evidence.on_policy_variance:.2f}",
            number(m.score_mean),
            f"{m.dropped:.3f}",
            f"{m.break_even:,.0f}" if m.bias > 1e-10 else "-",
        )
    return table


def _worlds(evidence: Evidence) -> Table:
    """Format how the order of estimators varies over policies and mismatches."""
    count = len(evidence.biases[NONE.name])
    title = f"Bias at mismatch {evidence.settings.plane:g}, pi = pi_old, over {count} seeds"
    table = _table(title, ["estimator"], ["median", "least", "greatest", "below none"])
    for name, biases in evidence.biases.items():
        below = sum(bias < none for bias, none in zip(biases, evidence.biases[NONE.name], strict=True))
        middle, least, greatest = (number(f(biases)) for f in (statistics.median, min, max))
        table.add_row(name, middle, least, greatest, f"{below} of {count}")
    return table


def _keep_rates(evidence: Evidence) -> Table:
    lengths = evidence.settings.lengths
    table = _table(
        f"Rows kept by length: normal distribution (of {evidence.settings.rows} simulated rows, shipped masks)",
        ["mask", "log-ratio a token"],
        [f"T = {length}" for length in lengths],
    )
    for aggregate, (lower, upper) in keep_rates.MASKS.items():
        for case in keep_rates.CASES:
            cells = (
                f"{keep_rates.expected(aggregate, case, length):.2f} ({evidence.shares[aggregate, case, length]:.2f})"
                for length in lengths
            )
            table.add_row(f"{aggregate} [{lower:g}, {upper:g}]", case.name, *cells)
    return table


def main(arguments: Sequence[str] | None = None, settings: EvidenceSettings | None = None) -> int:
    """Run the command; return 0, or 1 where something that should hold exactly does not.

    Args:
        settings: a smaller world for tests; ``--seed`` overrides its seed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of policy, mismatch and simulated rows (default 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "estimators.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    console = Console(width=WIDTH, markup=False)
    try:
        evidence = collect(replace(settings or EvidenceSettings(), seed=options.seed))
    except ClaimError as error:
        console.print(f"does NOT hold: {error}", highlight=False)
        return 1
    report(evidence, console)
    draw(evidence, options.out)
    console.print(f"picture: {options.out}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same order of sums on every machine
    sys.exit(main())
