"""The verdicts of PLAN.md on the committed runs."""

from __future__ import annotations

import pandas
from seeds import bootstrap, holm, sign_flip

SEEDS = 20
PAIRS = {"H1": ("centred", "none"), "H2": ("tis_centred", "tis")}


def pivot_outcomes(table: pandas.DataFrame) -> pandas.DataFrame:
    """Pivot the exact matches after each run's last step: seed by arm, seeds that all arms have finished."""
    last = table.sort_values("step").groupby(["seed", "arm"])["exact"].last()
    return last.unstack("arm").dropna()


def format_table(table: pandas.DataFrame) -> str:
    """Format outcomes by arm and the paired differences; p values once all seeds are there."""
    outcomes = pivot_outcomes(table)
    done = len(outcomes)
    steps = table[table["step"] > 0]
    lines = [f"{done} of {SEEDS} seeds; exact matches after the last step: mean, least, greatest; k3 of all steps"]
    for arm in outcomes:
        found = outcomes[arm]
        k3 = steps[(steps["arm"] == arm) & steps["seed"].isin(outcomes.index)]["k3"].mean()
        lines.append(f"{arm:12} {found.mean():.3f}  {found.min():.3f}  {found.max():.3f}  {k3:.3f}")
    apart = {name: outcomes[one] - outcomes[other] for name, (one, other) in PAIRS.items()}
    adjusted = holm({name: sign_flip(each) for name, each in apart.items()}) if done == SEEDS else {}
    for name, (one, other) in PAIRS.items():
        low, high = bootstrap(apart[name])
        verdict = f", p = {adjusted[name]:.3f} (Holm)" if adjusted else ", no verdict before all seeds have run"
        lines.append(f"{name}: {one} - {other} {apart[name].mean():+.3f} ({low:+.3f} to {high:+.3f}){verdict}")
    return "\n".join(lines)
