"""Prints the comparisons that PLAN.md requires, from the committed runs: python scripts/evidence/real_model/judge.py"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collapse import results

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
SEEDS = 3
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
    if table.empty:
        return ""
    lines = ["| arm | seed | tokens first | tokens last | cut last | anchor | right before | right after |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    outcomes = pivot_outcomes(table)
    before = table[table["step"] == 0].set_index("seed")["right"]
    for (arm, seed), run in table[table["step"] > 0].groupby(["arm", "seed"]):
        last = run.tail(LAST)
        cells = (run["length"].iloc[0], last["length"].mean(), last["clipped"].mean(), run["anchor"].iloc[-1])
        tokens = " | ".join(
            "" if pandas.isna(each) else f"{each:.{digits}f}" for each, digits in zip(cells, (1, 1, 2, 1), strict=True)
        )
        lines.append(
            f"| `{arm}` | {seed} | {tokens} | {before.get(seed, before.mean()):.3f} | {outcomes.loc[seed, arm]:.3f} |"
        )
    return "\n".join(lines)


def format_table(table: pandas.DataFrame) -> str:
    """Format outcomes and mismatch of each arm, and the paired differences that the hypotheses are about."""
    table = table[~table["arm"].str.startswith(LENGTH)]
    outcomes = pivot_outcomes(table)
    before = table[table["step"] == 0]["right"].mean()
    steps = table[table["step"] > 1].groupby("arm")[list(MEASURES)].mean()
    lines = [f"right answers before training: {before:.3f}", "", "| arm | seeds | right answers, range | k3 | ESS |"]
    lines[-1] += " kept | update seen |"
    lines.append("|---|---|---|---|---|---|---|")
    for arm in steps.index:
        found = outcomes[arm].dropna() if arm in outcomes else pandas.Series(dtype=float)
        right = f"{found.mean():.3f} ({found.min():.3f} to {found.max():.3f})" if len(found) else ""
        measured = " | ".join("" if pandas.isna(each) else f"{each:.3f}" for each in steps.loc[arm])
        seeds = table[table["arm"] == arm]["seed"].nunique()
        lines.append(f"| `{arm}` | {seeds} | {right} | {measured} |")
    lines.append("")
    for one, other in PAIRS:
        if not {one, other} <= set(outcomes):
            continue
        apart = (outcomes[one] - outcomes[other]).dropna()
        if len(apart) < SEEDS:
            verdict = f"{len(apart)} of {SEEDS} pairs"
        else:
            agreed = (apart > 0).all() or (apart < 0).all()
            verdict = "all pairs agree" if agreed else "pairs disagree"
        each = ", ".join(f"{value:+.3f}" for value in apart)
        lines.append(f"* `{one}` - `{other}`: {each}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(format_table(results.read(DATA)))
    print(format_lengths(results.read(DATA)))
