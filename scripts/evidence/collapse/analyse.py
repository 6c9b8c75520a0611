"""Tables, verdicts and figure of docs/evidence/collapse.md, from the committed results alone.

    python scripts/evidence/collapse/analyse.py                   # tables and verdicts; a missing seed is an error
    python scripts/evidence/collapse/analyse.py --figure [PNG]    # docs/collapse.png by default

Tables leave out arms without runs, and panels without runs say so. PLAN.md has the hypotheses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.arms import ARMS, ETAS, FIRST_SEED, IN_PROCESS, RATES, ROUNDED, SEEDS
from seeds import bootstrap, cliffs_delta, draw_levels, equivalence, holm, page, sign_flip

from recipe.offpolicy.analysis.plotting import FigurePanel, add_legend, draw_panels, save
from scripts.harness import format_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST, RECOVERED, MARGIN = 6, 0.75, 0.05
"""Number of the 8 seeds in which H1 and H2 must hold, share of `in_step` that counts as recovered, and margin for the
control."""
STRAY, ERROR = 1e-5, 1e-6
"""Largest deviation of the control's weights from 1, and of its first gradient from the expected gradient."""
OFF_ETA = 0.5
"""Number of steps by which a run's measured staleness may differ from its eta before the run is marked."""
JUDGED = ("in_step", "late", "late_opsm", "control", "control_both")
NOT_RUN = "–"
HEADINGS = (
    *("arm", "seeds", "exact matches", "below their start", "mean of validations", "graded score", "k3"),
    *("ESS of the ratio", "kept", "length", "staleness by verl's versions"),
)
PICTURE = ROOT / "docs" / "collapse.png"
BY_STEP = ("in_step", "late", "late_opsm", "late_decoupled", "late_both")
CONTROL = ("control", "control_both")
LOOKS = {
    "uncorrected": ("C1", ("late", "none")),
    "in step, uncorrected": ("C0", ("in_step",)),
    "uncorrected ": ("C0", ("control",)),
    "OPSM": ("C2", ("late_opsm", "opsm")),
    "decoupled PPO": ("C3", ("late_decoupled", "decoupled")),
    "decoupled PPO and OPSM": ("C4", ("late_both", "control_both", "both")),
    "random rows, as many as OPSM": ("C5", ("random",)),
    "clip around mu (bypass)": ("C6", ("bypass",)),
}
COLOURS = {arm: colour for colour, arms in LOOKS.values() for arm in arms}
"""A correction has the same colour in all of the panels."""
WORDS = {arm: words.rstrip() for words, (_, arms) in LOOKS.items() for arm in arms}


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
    recovered = f"late_opsm reached {RECOVERED} of in_step's mean in {reached} of {len(opsm)} runs, and differs by "
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


# --- tables


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
    return format_markdown(HEADINGS, rows) if rows else []


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


def build_tables(whole: pandas.DataFrame, in_process: pandas.DataFrame) -> list[list[str]]:
    """Build those tables for which the results contain runs."""
    tables = [
        build_whole_table(whole),
        build_verdict_table(partial(judge, whole)),
        *(build_in_process_table(in_process, rate) for rate in RATES),
        *(build_verdict_table(partial(judge_in_process, in_process, rate)) for rate in RATES),
        build_rounded_table(in_process),
    ]
    return [table for table in tables if table]


# --- figure


def draw_by_step(axes: Axes, table: pandas.DataFrame, arms: Sequence[str]) -> None:
    """Plot exact match against the step: a thick line for the median over seeds, and a thin line for each seed."""
    for arm in arms:
        found = table[(table["arm"] == arm) & table["exact"].notna()]
        for _, of_seed in found.groupby("seed"):
            axes.plot(of_seed["step"], of_seed["exact"], color=COLOURS[arm], alpha=0.25, linewidth=0.8)
        if not found.empty:
            medians = found.groupby("step")["exact"].median()
            label = f"{WORDS[arm]} ({found['seed'].nunique()})"
            axes.plot(medians.index, medians, color=COLOURS[arm], marker="o", label=label)
    axes.set(xlabel="step", ylabel="exact matches, held out", ylim=(0, 1))


def draw_by_eta(axes: Axes, table: pandas.DataFrame, rate: float) -> None:
    """Draw outcomes over the sampler's staleness, for complete settings only: medians as lines, seeds as points."""
    for arm in IN_PROCESS:
        found = {eta: outcomes(table, f"{arm}-{eta}-{rate:g}")["outcome"] for eta in ETAS}
        found = {eta: each for eta, each in found.items() if len(each) == SEEDS}
        if not found:
            continue
        draw_levels(axes, found, ETAS, np.median, color=COLOURS[arm], label=f"{WORDS[arm]} ({SEEDS})")
    axes.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
    axes.set(xlabel="eta: steps by which the sampler is late", ylabel="exact matches, held out", ylim=(0, 1))


def draw(whole: pandas.DataFrame, in_process: pandas.DataFrame, path: Path) -> None:
    """Write the figure as a PNG; the numbers of seeds are shown in brackets."""

    def panel(title: str, draw_lines: Callable[[Axes], None]) -> FigurePanel:
        def lines(axes: Axes) -> None:
            axes.set_title(title)
            draw_lines(axes)
            if axes.get_legend_handles_labels()[0]:
                add_legend(axes, columns=2)
            else:
                axes.text(0.5, 0.5, "not run yet", ha="center", transform=axes.transAxes)

        return FigurePanel(lines)

    panels = [
        panel("Whole runs, engine 8 updates late", lambda axes: draw_by_step(axes, whole, BY_STEP)),
        panel("Control: nothing to correct", lambda axes: draw_by_step(axes, whole, CONTROL)),
        panel("In process, sampler eta steps late", lambda axes: draw_by_eta(axes, in_process, RATES[0])),
    ]
    save(draw_panels(panels, columns=3, title="Collapse and recovery"), path, dpi=110)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status, 1 if runs are missing."""
    whole, in_process = results.read(), results.read(results.IN_PROCESS)
    if arguments[:1] == ["--figure"]:
        path = Path(arguments[1]) if arguments[1:] else PICTURE
        draw(whole, in_process, path)
        print(f"picture: {path.name}")
        return 0
    print("\n\n".join("\n".join(table) for table in build_tables(whole, in_process)))
    status = 0
    for find_verdicts in (partial(judge, whole), *(partial(judge_in_process, in_process, rate) for rate in RATES)):
        try:
            find_verdicts()
        except MissingRunsError as error:
            print(f"no verdict: {error}")
            status = 1
    return status


if __name__ == "__main__":
    from recipe.offpolicy.process_start import answer_help

    answer_help(__doc__)
    sys.exit(main(sys.argv[1:]))
