"""Prints the tables of docs/collapse.md, and README's, from committed results.

python scripts/evidence/collapse/evidence_tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results  # noqa: E402
from collapse.analyse import (  # noqa: E402
    MissingRunsError,
    Verdict,
    judge,
    judge_in_process,
    list_off_eta,
    measure_staleness,
    outcomes,
)
from collapse.arms import ARMS  # noqa: E402
from collapse.late_runs import ARMS as IN_PROCESS_ARMS  # noqa: E402
from collapse.late_runs import ETAS, RATES, ROUNDED, SEEDS  # noqa: E402
from collapse.significance import bootstrap, sign_flip  # noqa: E402

NOT_RUN = "–"


def format_spread(values: pandas.Series) -> str:
    """Format a median with the least and the largest of the seeds."""
    return f"{values.median():.3f} ({values.min():.3f} to {values.max():.3f})"


def count_below(found: pandas.DataFrame) -> int:
    """Count the seeds that ended below their own start."""
    return int((found["outcome"] < found["start"]).sum())


def format_difference(one: pandas.Series, other: pandas.Series) -> str:
    """Format the mean difference of outcomes paired by seed: its interval, and p of the sign-flip test."""
    apart = (one - other).dropna()
    low, high = bootstrap(apart)
    return f"{apart.mean():+.3f} [{low:+.3f}, {high:+.3f}], p = {sign_flip(apart):.2g}"


def build_whole_table(table: pandas.DataFrame) -> list[str]:
    """Build the lines of the table of whole runs, of the arms that were run; nothing where none was."""
    lines = [
        "| arm | seeds | exact matches | below their start | mean of validations | graded score | k3 "
        "| ESS of the ratio | kept | length | staleness by verl's versions |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        found = outcomes(table, arm.name)
        if found.empty:
            continue
        steps = table[(table["arm"] == arm.name) & (table["step"] > 0)]
        staleness = measure_staleness(steps)
        off = ", ".join(map(str, list_off_eta(staleness, arm.eta)))
        cells = (
            f"`{arm.name}`",
            f"{len(found)} of {arm.seeds}",
            format_spread(found["outcome"]),
            f"{count_below(found)}",
            f"{found['mean'].median():.3f}",
            f"{found['graded'].median():.3f}",
            f"{steps['k3'].median():.2g}",
            f"{steps['ratio_ess'].median():.2f}",
            f"{steps['kept'].mean():.2f}",
            f"{steps['length'].median():.1f}",
            f"{staleness.mean():.2f}{f' (off its eta: seed {off})' if off else ''}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines * (len(lines) > 2)


def build_verdict_table(find_verdicts: Callable[[], list[Verdict]]) -> list[str]:
    """Build the lines of a table of verdicts; nothing where a run that they need is missing."""
    try:
        verdicts = find_verdicts()
    except MissingRunsError:
        return []
    rows = [f"| {each.name} | {'holds' if each.holds else '**fails**'} | {each.found} |" for each in verdicts]
    return ["| hypothesis | verdict | found |", "|---|---|---|", *rows]


def build_in_process_table(table: pandas.DataFrame, rate: float) -> list[str]:
    """Build the lines of the table of runs in one process at a learning rate: arms by steps late, whole settings.

    Nothing where no setting has all of its seeds; a dash where one lacks some.
    """
    etas = [f"eta {eta}" for eta in ETAS]
    lines = [f"| arm, rate {rate:g} | {' | '.join(etas)} |", "|---|" + "---|" * len(ETAS)]
    for arm in IN_PROCESS_ARMS:
        cells = [format_setting(table, f"{arm}-{eta}-{rate:g}") for eta in ETAS]
        lines += [f"| `{arm}` | {' | '.join(cells)} |"] * (set(cells) != {NOT_RUN})
    return lines * (len(lines) > 2)


def format_setting(table: pandas.DataFrame, setting: str) -> str:
    """Format the outcome of a setting, and how many seeds ended below their start; a dash where seeds are missing."""
    found = outcomes(table, setting)
    if len(found) < SEEDS:
        return NOT_RUN
    below = count_below(found)
    return format_spread(found["outcome"]) + (f", {below} below" if below else "")


def build_rounded_table(table: pandas.DataFrame) -> list[str]:
    """Build the lines of the table of backend noise alone, in process; nothing where none was run."""
    lines = ["| arm, in step | engine as the trainer | its weights rounded | k3, rounded |", "|---|---|---|---|"]
    for arm in ROUNDED:
        setting = f"{arm}-0-{RATES[0]:g}"
        steps = table[table["arm"] == f"{setting}-rounded"]
        cells = [format_setting(table, each) for each in (setting, f"{setting}-rounded")]
        if cells[1] != NOT_RUN:
            lines.append(f"| `{arm}` | {' | '.join(cells)} | {steps['k3'].median():.2g} |")
    return lines * (len(lines) > 2)


def build_tables() -> list[list[str]]:
    """Build the tables that there are runs for, from what is committed."""
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
    sys.exit(main(sys.argv[1:]))
