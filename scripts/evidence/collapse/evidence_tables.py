"""Prints the tables of docs/evidence/collapse.md from committed results.

python scripts/evidence/collapse/evidence_tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.analyse import MissingRunsError, Verdict, count_below, describe, judge, judge_in_process, outcomes
from collapse.arms import ETAS, IN_PROCESS, RATES, ROUNDED, SEEDS
from seeds import bootstrap, sign_flip

from scripts.harness import format_markdown

NOT_RUN = "–"
WHOLE = (
    *("arm", "seeds", "exact matches", "below their start", "mean of validations", "graded score", "k3"),
    *("ESS of the ratio", "kept", "length", "staleness by verl's versions"),
)


def format_spread(values: pandas.Series) -> str:
    """Format a median, with the smallest and the largest value over the seeds."""
    return f"{values.median():.3f} ({values.min():.3f} to {values.max():.3f})"


def format_difference(one: pandas.Series, other: pandas.Series) -> str:
    """Format the mean difference of outcomes paired by seed, its interval, and p of the sign-flip test."""
    apart = (one - other).dropna()
    low, high = bootstrap(apart)
    return f"{apart.mean():+.3f} [{low:+.3f}, {high:+.3f}], p = {sign_flip(apart):.2g}"


def build_whole_table(table: pandas.DataFrame) -> list[str]:
    """Build the lines of the table of whole runs, for the arms that were run; empty if no arm was run."""
    rows = []
    for arm in describe(table).to_dict("records"):
        off = ", ".join(map(str, arm["off eta"]))
        rows.append(
            (
                f"`{arm['arm']}`",
                arm["seeds"],
                f"{arm['exact']:.3f} ({arm['least']:.3f} to {arm['most']:.3f})",
                arm["below"],
                f"{arm['mean']:.3f}",
                f"{arm['graded']:.3f}",
                f"{arm['k3']:.2g}",
                f"{arm['ratio ESS']:.2f}",
                f"{arm['kept']:.2f}",
                f"{arm['length']:.1f}",
                f"{arm['staleness']:.2f}{f' (off its eta: seed {off})' if off else ''}",
            )
        )
    return format_markdown(WHOLE, rows) if rows else []


def build_verdict_table(find_verdicts: Callable[[], list[Verdict]]) -> list[str]:
    """Build the lines of a table of verdicts; empty if a run that the verdicts need is missing."""
    try:
        rows = [(each.name, "holds" if each.holds else "**fails**", each.found) for each in find_verdicts()]
    except MissingRunsError:
        return []
    return format_markdown(("hypothesis", "verdict", "found"), rows)


def build_in_process_table(table: pandas.DataFrame, rate: float) -> list[str]:
    """Build the lines of the table of in-process runs at one learning rate: arms by lag, for complete settings.

    The table is empty if no setting has all of its seeds, and shows a dash for a setting that lacks some of its seeds.
    """
    cells = {arm: [format_setting(table, f"{arm}-{eta}-{rate:g}") for eta in ETAS] for arm in IN_PROCESS}
    rows = [(f"`{arm}`", *found) for arm, found in cells.items() if set(found) != {NOT_RUN}]
    return format_markdown((f"arm, rate {rate:g}", *(f"eta {eta}" for eta in ETAS)), rows) if rows else []


def format_setting(table: pandas.DataFrame, setting: str) -> str:
    """Format the outcome of a setting, and how many seeds ended below their start; a dash if seeds are missing."""
    found = outcomes(table, setting)
    if len(found) < SEEDS:
        return NOT_RUN
    below = count_below(found)
    return format_spread(found["outcome"]) + (f", {below} below" if below else "")


def build_rounded_table(table: pandas.DataFrame) -> list[str]:
    """Build the lines of the table of in-process runs with backend noise alone; empty if nothing was run."""
    rows = []
    for arm in ROUNDED:
        setting = f"{arm}-0-{RATES[0]:g}"
        k3 = table.loc[table["arm"] == f"{setting}-rounded", "k3"].median()
        cells = [format_setting(table, each) for each in (setting, f"{setting}-rounded")]
        if cells[1] != NOT_RUN:
            rows.append((f"`{arm}`", *cells, f"{k3:.2g}"))
    headings = ("arm, in step", "engine as the trainer", "its weights rounded", "k3, rounded")
    return format_markdown(headings, rows) if rows else []


def build_tables() -> list[list[str]]:
    """Build those tables for which the committed results contain runs."""
    whole, in_process = results.read(), results.read(results.IN_PROCESS)
    tables = [
        build_whole_table(whole),
        build_verdict_table(partial(judge, whole)),
        *(build_in_process_table(in_process, rate) for rate in RATES),
        *(build_verdict_table(partial(judge_in_process, in_process, rate)) for rate in RATES),
        build_rounded_table(in_process),
    ]
    return [table for table in tables if table]


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    print("\n\n".join("\n".join(table) for table in build_tables()))
    return 0


if __name__ == "__main__":
    from recipe.offpolicy.usage import answer_help

    answer_help(__doc__)
    sys.exit(main(sys.argv[1:]))
