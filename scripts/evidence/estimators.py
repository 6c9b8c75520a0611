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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout's recipe, installed or not

import keep_rates
import torch
from estimator_catalogue import ESTIMATORS, NONE
from estimator_evidence import Evidence, EvidenceSettings, collect
from estimator_figure import draw
from expectation import Measurement
from rich.console import Console
from rich.table import Table
from seeds import ClaimError

WIDTH = 120


def report(evidence: Evidence, console: Console) -> None:
    """Print all tables and sentences."""
    settings, plane = evidence.settings, evidence.settings.plane

    def show(title: str, left: Sequence[str], right: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        table = Table(*left, title=title, title_style="bold", title_justify="left")
        for heading in right:
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def variance(measurement: Measurement) -> str:
        return f"{measurement.variance / evidence.on_policy_variance:.2f}"

    at_old = f"pi = pi_old, by mismatch (V = {settings.vocabulary}, T = {settings.length})"
    at_stale = f"mismatch {settings.stale_mismatch:g}, by staleness of pi"
    tables: list[tuple[str, dict[float, dict[str, Measurement]], Callable[[Measurement], str]]] = [
        (f"Bias |E[g] - grad J| / |grad J|; {at_old}", evidence.mismatches, bias),
        (f"Cosine of E[g] and grad J; {at_old}", evidence.mismatches, cosine),
        (f"Variance of one row's gradient, 1 = on-policy; {at_old}", evidence.mismatches, variance),
        (
            f"Score mean |E[sum_t w_t grad log pi_t]|, 0 = baselines add no bias; {at_old}",
            evidence.mismatches,
            lambda m: number(m.score_mean),
        ),
        (f"Bias; {at_stale}", evidence.stalenesses, bias),
    ]
    for title, levels, cell in tables:
        rows = [[e.name, *(cell(row[e.name]) for row in levels.values())] for e in ESTIMATORS]
        show(title, ["estimator"], [f"{level:g}" for level in levels], rows)
    legend = "removed: share of tokens; rows: batch whose standard error is the bias"
    headings = ["bias", "cosine", "variance", "score mean", "removed", "rows"]
    found = {name: evidence.mismatches[plane][name] for name in evidence.biases}
    show(
        f"pi = pi_old at mismatch {plane:g}; {legend}",
        ["estimator"],
        headings,
        (
            [name, bias(m), cosine(m), variance(m), number(m.score_mean), f"{m.dropped:.3f}", break_even(m)]
            for name, m in found.items()
        ),
    )
    nones = evidence.biases[NONE.name]
    for name in ("options", "stale_options"):
        found, where = getattr(evidence, name), "" if name == "options" else f", pi stale by {settings.stale:g}"
        show(
            f"Every option of the group correction at mismatch {plane:g}{where}; drift: the score mean",
            ["option"],
            ["bias", "cosine", "variance", "drift", "removed"],
            (
                [option, bias(m), cosine(m), variance(m), number(m.score_mean), f"{m.dropped:.3f}"]
                for option, m in found.items()
            ),
        )
    rows = []
    for name, biases in evidence.biases.items():
        below = sum(bias < none for bias, none in zip(biases, nones, strict=True))
        ordered = [number(each(biases)) for each in (statistics.median, min, max)]
        rows.append([name, *ordered, f"{below} of {len(nones)}"])
    over = f"Bias at mismatch {plane:g}, pi = pi_old, over {len(nones)} seeds"
    show(over, ["estimator"], ["median", "least", "greatest", "below none"], rows)
    rows = [
        [
            f"{aggregate} [{lower:g}, {upper:g}]",
            case.name,
            *(
                f"{keep_rates.expected(aggregate, case, T):.2f} ({evidence.shares[aggregate, case, T]:.2f})"
                for T in settings.lengths
            ),
        ]
        for aggregate, (lower, upper) in keep_rates.MASKS.items()
        for case in keep_rates.CASES
    ]
    kept = f"Rows kept by length: normal distribution (of {settings.rows} simulated rows, shipped masks)"
    show(kept, ["mask", "log-ratio a token"], [f"T = {length}" for length in settings.lengths], rows)
    for sentence in evidence.sentences:
        console.print(f"holds: {sentence}", highlight=False)


def number(value: float) -> str:
    """Format with two digits; rounding errors as 0."""
    return "0" if value < 1e-10 else f"{value:.2g}"


def bias(measurement: Measurement) -> str:
    return number(measurement.bias)


def cosine(measurement: Measurement) -> str:
    return "-" if math.isnan(measurement.cosine) else f"{measurement.cosine:.3f}"


def break_even(measurement: Measurement) -> str:
    return f"{measurement.break_even:,.0f}" if measurement.bias > 1e-10 else "-"


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
