"""Judges the hypotheses in PLAN.md from the committed results alone.

python scripts/evidence/collapse/analyse.py        # tables and verdicts; a missing seed is an error
python scripts/evidence/collapse/analyse.py --partial    # the available results, without verdicts
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.arms import ARMS, ETAS, FIRST_SEED, IN_PROCESS, RATES, SEEDS
from seeds import bootstrap, cliffs_delta, equivalence, holm, page, sign_flip

MOST, RECOVERED, MARGIN = 6, 0.75, 0.05
"""Number of the 8 seeds in which H1 and H2 must hold, share of `in_step` that counts as recovered, and margin for the
control."""
STRAY, ERROR = 1e-5, 1e-6
"""Largest deviation of the control's weights from 1, and of its first gradient from the expected gradient."""
OFF_ETA = 0.5
"""Number of steps by which a run's measured staleness may differ from its eta before the run is marked."""


JUDGED = ("in_step", "late", "late_opsm", "control", "control_both")


class MissingRunsError(ValueError):
    """Runs that a verdict needs are missing."""


@dataclass(frozen=True)
class Verdict:
    """A hypothesis, and the verdict on it.

    Attributes:
        p: p value before Holm's correction; NaN if the verdict has none.
    """

    name: str
    holds: bool
    found: str
    p: float = float("nan")


def outcomes(table: pandas.DataFrame, setting: str) -> pandas.DataFrame:
    """Collect the exact matches of a setting, before training and after the last step, for each seed.

    A run that died before its end has an outcome of 0.
    """
    found = table[(table["arm"] == setting) & table["exact"].notna()].sort_values("step").groupby("seed")
    found = found.agg(
        start=("exact", "first"),
        outcome=("exact", "last"),
        mean=("exact", lambda each: each.iloc[1:].mean()),
        graded=("graded", "last"),
        ended=("outcome", "first"),
    )
    found.loc[found["ended"] != "finished", ["outcome", "mean"]] = 0.0
    return found


def take(table: pandas.DataFrame, setting: str, seeds: int = SEEDS, program: str = "in_process") -> pandas.DataFrame:
    """Return the outcomes of a setting for all of its seeds.

    Raises:
        MissingRunsError: seeds that PLAN.md names are missing.
    """
    found = outcomes(table, setting)
    if missing := sorted(set(range(FIRST_SEED, FIRST_SEED + seeds)) - set(found.index)):
        fix = f"python scripts/evidence/collapse/{program}.py {setting}"
        raise MissingRunsError(f"{setting}: seeds {', '.join(map(str, missing))} have not been run. Fix: {fix}")
    return found


def describe_apart(one: pandas.Series, other: pandas.Series) -> tuple[float, str]:
    """Describe the paired difference of outcomes: the lower end of its interval, and a sentence with a {name}."""
    low, high = bootstrap(one - other)
    delta = f"Cliff's delta {cliffs_delta(one, other):+.2f}"
    return low, f"{(one - other).mean():+.3f} [{low:+.3f}, {high:+.3f}] from {{name}}, {delta}"


def judge(table: pandas.DataFrame) -> list[Verdict]:
    """Judge H1 to H4 from the whole runs.

    Raises:
        MissingRunsError: a run is missing.
    """
    seeds = {arm.name: arm.seeds for arm in ARMS}
    found = {name: take(table, name, seeds[name], "run") for name in JUDGED}
    in_step, late, opsm, control, both = (each["outcome"] for each in found.values())
    start = found["late"]["start"]
    below, reached = int((late < start).sum()), int((opsm >= RECOVERED * in_step.mean()).sum())
    low, apart = describe_apart(opsm, late)
    rows = table[(table["arm"] == "control_both") & table["proved"].notna()]
    kept = rows["kept"].min()
    stray = (rows[["weight_min", "weight_max"]] - 1.0).abs().max().max()
    error = rows.groupby("seed")["gradient_error"].first().max()
    gap = both - control
    p = {"H1": sign_flip(late - start), "H3": sign_flip(opsm - late), "H4": equivalence(gap, MARGIN)}
    adjusted = holm(p)
    recovered = f"late_opsm reached {RECOVERED} of in_step's mean in {reached} of {len(opsm)}; it is "
    alike = (
        f"control_both is {gap.mean():+.3f} ({gap.min():+.3f} to {gap.max():+.3f}) from control, p = {p['H4']:.4f}; "
        f"kept {kept:.3f}, weights within {stray:.1e} of 1 (allowed {STRAY:.0e}), gradient error {error:.1e}"
    )
    exact = bool(kept == 1.0 and stray < STRAY and error < ERROR)
    return [
        Verdict("H1", below >= MOST, f"late collapsed in {below} of {len(late)}", p["H1"]),
        Verdict("H2", reached >= MOST and low > 0, recovered + apart.format(name="late")),
        Verdict("H3", adjusted["H3"] <= 0.05, f"p = {p['H3']:.4f}, {adjusted['H3']:.4f} by Holm", p["H3"]),
        Verdict("H4", exact and adjusted["H4"] <= 0.05, alike, p["H4"]),
    ]


def judge_in_process(table: pandas.DataFrame, rate: float) -> list[Verdict]:
    """Judge H5 from the in-process runs at one learning rate: the trend of each arm, and ``opsm`` against ``random``.

    Raises:
        MissingRunsError: a run is missing.
    """
    found = {arm: [take(table, f"{arm}-{eta}-{rate:g}")["outcome"] for eta in ETAS] for arm in IN_PROCESS}
    verdicts = []
    for arm, levels in found.items():
        p = page(np.column_stack([level.sort_index() for level in levels]))
        medians, etas = ", ".join(f"{level.median():.3f}" for level in levels), ", ".join(map(str, ETAS))
        verdicts.append(Verdict(f"H5 {arm} {rate:g}", p <= 0.05, f"medians {medians} at eta {etas}; p = {p:.4f}", p))
    opsm, random = found["opsm"][-1], found["random"][-1]
    p, (low, apart) = sign_flip(opsm - random), describe_apart(opsm, random)
    said = f"opsm is {apart.format(name=f'random at eta {ETAS[-1]}')}; p = {p:.4f}"
    return [*verdicts, Verdict(f"H5 opsm over random {rate:g}", bool(p <= 0.05 and low > 0), said, p)]


def describe_in_process(table: pandas.DataFrame) -> pandas.DataFrame:
    """Describe the settings that were run in process: the median outcome of the finished seeds, by arm and eta."""
    found = []
    for setting in table["arm"].unique():
        arm, eta, rate = setting.split("-", 2)
        each = outcomes(table, setting)["outcome"]
        found.append({"rate": rate, "arm": arm, "eta": int(eta), "exact": each.median(), "seeds": len(each)})
    return pandas.DataFrame(found).pivot_table(index=["rate", "arm"], columns="eta", values=["exact", "seeds"])


def list_off_eta(staleness: pandas.Series, eta: int | None) -> list[int]:
    """List the seeds whose run differs by more than ``OFF_ETA`` from the requested staleness."""
    return [] if eta is None else [int(seed) for seed in staleness.index[(staleness - eta).abs() > OFF_ETA]]


def describe(table: pandas.DataFrame) -> pandas.DataFrame:
    """Describe each arm: the median outcome, the range over the seeds, and the measurements of its steps."""
    lines = []
    for arm in ARMS:
        found = outcomes(table, arm.name)
        if found.empty:
            continue
        steps = table[(table["arm"] == arm.name) & (table["step"] > 0)]
        staleness = steps.groupby("seed")["staleness"].mean()
        lines.append(
            {
                "arm": arm.name,
                "seeds": f"{len(found)} of {arm.seeds}",
                "before": found["start"].median(),
                "exact": found["outcome"].median(),
                "least": found["outcome"].min(),
                "most": found["outcome"].max(),
                "below": count_below(found),
                "mean": found["mean"].median(),
                "graded": found["graded"].median(),
                "k3": steps["k3"].median(),
                "ratio ESS": steps["ratio_ess"].median(),
                "kept": steps["kept"].mean(),
                "length": steps["length"].median(),
                "staleness": staleness.mean(),
                "off eta": list_off_eta(staleness, arm.eta),
            }
        )
    return pandas.DataFrame(lines)


def count_below(found: pandas.DataFrame) -> int:
    """Count the seeds whose runs ended below their own start."""
    return int((found["outcome"] < found["start"]).sum())


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status, 1 if runs are missing."""
    status, without_verdicts = 0, "--partial" in arguments
    at_rates = [partial(judge_in_process, rate=rate) for rate in RATES]
    for path, show, judges in (
        (results.DATA, lambda table: describe(table).drop(columns="below"), [judge]),
        (results.IN_PROCESS, describe_in_process, at_rates),
    ):
        table = results.read(path)
        print(f"{path.name}: {table[['arm', 'seed']].drop_duplicates().shape[0]} runs")
        if not table.empty:
            with pandas.option_context("display.width", 160, "display.max_columns", 20):
                print(show(table).to_string(float_format=lambda value: f"{value:.3f}"))
        for verdicts_on in judges if not without_verdicts else ():
            try:
                for verdict in verdicts_on(table):
                    print(f"{verdict.name} {'holds' if verdict.holds else 'FAILS'}: {verdict.found}")
            except MissingRunsError as error:
                print(f"no verdict: {error}")
                status = 1
    return status


if __name__ == "__main__":
    from recipe.offpolicy.usage import answer_help

    answer_help(__doc__)
    sys.exit(main(sys.argv[1:]))
