"""Prints the comparisons that PLAN.md requires, from the committed runs: python scripts/evidence/real_model/judge.py"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas

sys.path[:0] = [str(Path(__file__).resolve().parents[place]) for place in (3, 1)]

from collapse import results

from scripts.harness import format_markdown

DATA = Path(__file__).resolve().with_name("results.parquet")
MEASURES = ("k3", "ratio_ess", "kept", "update_seen")
PAIRS = (
    ("tis", "none"),
    ("opsm", "none"),
    ("late_opsm", "late_none"),
    ("none", "gsm"),
    ("gsm_wide", "gsm"),
    ("float32", "none"),
)
LENGTH = "length_"
"""Prefix of the names of arms that compare length penalties."""
LAST = 3
"""Number of final steps over which lengths are averaged."""


def pivot_outcomes(table: pandas.DataFrame) -> pandas.DataFrame:
    """Pivot the share of correct answers after the last step: seed by arm; 0 for a run that did not finish."""
    ordered = table.sort_values("step")
    last = ordered.groupby(["seed", "arm"])["right"].last()
    finished = ordered.groupby(["seed", "arm"])["outcome"].last() == "finished"
    return last.where(finished, 0.0).unstack("arm")


def format_lengths(table: pandas.DataFrame) -> str:
    """Format the comparison of length penalties: tokens and correct answers at the start and at the end."""
    table = table[table["arm"].str.startswith(LENGTH)].sort_values("step")
    headings = ("arm", "seed", "tokens first", "tokens last", "cut last", "anchor", "right before", "right after")
    rows, outcomes = [], pivot_outcomes(table)
    before = table[table["step"] == 0].set_index("seed")["right"]
    for (arm, seed), run in table[table["step"] > 0].groupby(["arm", "seed"]):
        last = run.tail(LAST)
        tokens = (run["length"].iloc[0], last["length"].mean(), last["clipped"].mean(), run["anchor"].iloc[-1])
        cells = map(format_number, tokens, (1, 1, 2, 1))
        right = f"{before.get(seed, before.mean()):.3f}", f"{outcomes.loc[seed, arm]:.3f}"
        rows.append((f"`{arm}`", seed, *cells, *right))
    return "\n".join(format_markdown(headings, rows))


def format_number(value: float, digits: int = 3) -> str:
    return "" if pandas.isna(value) else f"{value:.{digits}f}"


def format_table(table: pandas.DataFrame) -> str:
    """Format outcomes and mismatch of each arm, and the paired differences that the hypotheses are about."""
    table = table[~table["arm"].str.startswith(LENGTH)]
    outcomes = pivot_outcomes(table)
    before = table[table["step"] == 0]["right"].mean()
    steps = table[table["step"] > 1].groupby("arm")[list(MEASURES)].mean()
    rows = []
    for arm in steps.index:
        found = outcomes[arm].dropna()
        right = f"{found.mean():.3f} ({found.min():.3f} to {found.max():.3f})" if len(found) else ""
        seeds = table[table["arm"] == arm]["seed"].nunique()
        rows.append((f"`{arm}`", seeds, right, *map(format_number, steps.loc[arm])))
    headings = ("arm", "seeds", "right answers, range", "k3", "ESS", "kept", "update seen")
    lines = [f"right answers before training: {before:.3f}", "", *format_markdown(headings, rows), ""]
    for one, other in (pair for pair in PAIRS if set(pair) <= set(outcomes)):
        apart = (outcomes[one] - outcomes[other]).dropna()
        agreed = (apart > 0).all() or (apart < 0).all()
        verdict = "all pairs agree" if agreed else "pairs disagree"
        each = ", ".join(f"{value:+.3f}" for value in apart)
        lines.append(f"* `{one}` - `{other}`: {each}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(format_table(results.read(DATA)))
    print(format_lengths(results.read(DATA)))
