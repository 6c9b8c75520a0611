"""Tables, verdicts and figure of docs/evidence/collapse.md, from the committed results alone.

    python scripts/evidence/collapse/analyse.py                   # tables and verdicts
    python scripts/evidence/collapse/analyse.py --figure [PNG]    # docs/collapse.png by default

PLAN.md states the hypotheses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.arms import ARMS, ETAS, IN_PROCESS, RATES, ROUNDED, SEEDS
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
HEADINGS = (
    *("arm", "seeds", "exact matches", "seeds below start", "mean of validations", "graded score", "k3"),
    *("ESS of the ratio", "kept share", "length", "staleness recorded by verl"),
)
PICTURE = ROOT / "docs" / "collapse.png"
BY_STEP = ("in_step", "late", "late_opsm", "late_decoupled", "late_both")
CONTROL = ("control", "control_both")
LOOKS = {
    **dict.fromkeys(("late", "none"), ("uncorrected", "C1")),
    "in_step": ("in step, uncorrected", "C0"),
    "control": ("uncorrected", "C0"),
    **dict.fromkeys(("late_opsm", "opsm"), ("OPSM", "C2")),
    **dict.fromkeys(("late_decoupled", "decoupled"), ("decoupled PPO", "C3")),
    **dict.fromkeys(("late_both", "control_both", "both"), ("decoupled PPO and OPSM", "C4")),
    "random": ("random rows, as many as OPSM", "C5"),
    "bypass": ("clip around mu (bypass)", "C6"),
}
"""Arm -> label and colour; a correction has the same colour in all of the panels."""


class Verdict(NamedTuple):
    """A hypothesis, and the verdict on it."""

    name: str
    holds: bool
    found: str


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
    return found.assign(below=found["outcome"] < found["start"])


def describe_apart(one: pandas.Series, other: pandas.Series, name: str) -> tuple[float, str]:
    """Describe the paired difference of outcomes, called ``name``: lower end of its interval, and a text."""
    low, high = bootstrap(one - other)
    apart = f"{(one - other).mean():+.3f} [{low:+.3f}, {high:+.3f}]"
    return low, f"{name} = {apart}, Cliff's delta {cliffs_delta(one, other):+.2f}"


def judge(table: pandas.DataFrame) -> list[Verdict]:
    """Judge H1 to H4 from the whole runs."""
    found = {name: outcomes(table, name) for name in JUDGED}
    in_step, late, opsm, control, both = (each["outcome"] for each in found.values())
    start = found["late"]["start"]
    below, reached = int((late < start).sum()), int((opsm >= RECOVERED * in_step.mean()).sum())
    low, apart = describe_apart(opsm, late, "late_opsm - late")
    rows = table[(table["arm"] == "control_both") & table["proved"].notna()]
    kept = rows["kept"].min()
    stray = (rows[["weight_min", "weight_max"]] - 1.0).abs().max().max()
    error = rows.groupby("seed")["gradient_error"].first().max()
    gap = both - control
    p = {"H1": sign_flip(late - start), "H3": sign_flip(opsm - late), "H4": equivalence(gap, MARGIN)}
    adjusted = holm(p)
    recovered = f"late_opsm reached {RECOVERED} of in_step's mean in {reached} of {len(opsm)} runs; "
    alike = (
        f"control_both - control = {gap.mean():+.3f} ({gap.min():+.3f} to {gap.max():+.3f}), p = {p['H4']:.4f}; "
        f"kept share {kept:.3f}; weights within {stray:.1e} of 1 (planned: {STRAY:.0e}); gradient error {error:.1e}"
    )
    exact = bool(kept == 1.0 and stray < STRAY and error < ERROR)
    return [
        Verdict("H1", below >= MOST, f"late collapsed in {below} of {len(late)}"),
        Verdict("H2", reached >= MOST and low > 0, recovered + apart),
        Verdict("H3", adjusted["H3"] <= 0.05, f"p = {p['H3']:.4f}, adjusted by Holm {adjusted['H3']:.4f}"),
        Verdict("H4", exact and adjusted["H4"] <= 0.05, alike),
    ]


def judge_in_process(table: pandas.DataFrame, rate: float) -> list[Verdict]:
    """Judge H5 from the in-process runs at one rate: the trend of each arm, and ``opsm`` against ``random``."""
    found = {arm: [outcomes(table, f"{arm}-{eta}-{rate:g}")["outcome"] for eta in ETAS] for arm in IN_PROCESS}
    verdicts, etas = [], ", ".join(map(str, ETAS))
    for arm, levels in found.items():
        p, medians = page(np.column_stack(levels)), ", ".join(f"{level.median():.3f}" for level in levels)
        verdicts.append(Verdict(f"H5 {arm} {rate:g}", p <= 0.05, f"medians {medians} at eta {etas}; p = {p:.4f}"))
    opsm, random = found["opsm"][-1], found["random"][-1]
    p, (low, apart) = sign_flip(opsm - random), describe_apart(opsm, random, f"at eta {ETAS[-1]}, opsm - random")
    holds = bool(p <= 0.05 and low > 0)
    return [*verdicts, Verdict(f"H5 opsm over random {rate:g}", holds, f"{apart}; p = {p:.4f}")]


# --- tables


def format_spread(values: pandas.Series) -> str:
    """Format a median, with the smallest and the largest value over the seeds."""
    return f"{values.median():.3f} ({values.min():.3f} to {values.max():.3f})"


def build_whole_table(table: pandas.DataFrame) -> list[str]:
    """Build the lines of the table of whole runs: outcomes over the seeds, and the measurements of the steps."""
    rows = []
    for arm in ARMS:
        found = outcomes(table, arm.name)
        steps = table[(table["arm"] == arm.name) & (table["step"] > 0)]
        staleness = steps.groupby("seed")["staleness"].mean()
        far = [] if arm.eta is None else staleness.index[(staleness - arm.eta).abs() > OFF_ETA]
        off = f" (not as planned: seed {', '.join(str(int(seed)) for seed in far)})" if len(far) else ""
        rows.append(
            (
                *(
                    f"`{arm.name}`",
                    f"{len(found)} of {arm.seeds}",
                    format_spread(found["outcome"]),
                    found["below"].sum(),
                ),
                *(f"{found['mean'].median():.3f}", f"{found['graded'].median():.3f}", f"{steps['k3'].median():.2g}"),
                *(f"{steps['ratio_ess'].median():.2f}", f"{steps['kept'].mean():.2f}"),
                *(f"{steps['length'].median():.1f}", f"{staleness.mean():.2f}{off}"),
            )
        )
    return format_markdown(HEADINGS, rows)


def build_verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """Build the lines of a table of verdicts."""
    rows = [(each.name, "holds" if each.holds else "**fails**", each.found) for each in verdicts]
    return format_markdown(("hypothesis", "verdict", "result"), rows)


def build_in_process_table(table: pandas.DataFrame, rate: float) -> list[str]:
    """Build the lines of the table of in-process runs at one learning rate: arms by lag."""
    rows = [
        (f"`{arm}`", *(format_setting(table, f"{arm}-{eta}-{rate:g}") for eta in ETAS)) for arm in IN_PROCESS
    ]  # fmt: skip
    return format_markdown((f"arm, rate {rate:g}", *(f"eta {eta}" for eta in ETAS)), rows)


def format_setting(table: pandas.DataFrame, setting: str) -> str:
    """Format the outcome of a setting, and how many seeds ended below their start."""
    found = outcomes(table, setting)
    below = found["below"].sum()
    return format_spread(found["outcome"]) + (f", {below} below" if below else "")


def build_rounded_table(table: pandas.DataFrame) -> list[str]:
    """Build the lines of the table of in-process runs with backend noise alone."""
    rows = []
    for arm in ROUNDED:
        pair = (f"{arm}-0-{RATES[0]:g}", f"{arm}-0-{RATES[0]:g}-rounded")
        k3 = table.loc[table["arm"] == pair[1], "k3"].median()
        rows.append((f"`{arm}`", *(format_setting(table, each) for each in pair), f"{k3:.2g}"))
    return format_markdown(("arm, in step", "weights of the trainer", "rounded weights", "k3, rounded weights"), rows)


def build_tables(whole: pandas.DataFrame, in_process: pandas.DataFrame) -> list[list[str]]:
    """Build all tables."""
    return [
        build_whole_table(whole),
        build_verdict_table(judge(whole)),
        *(build_in_process_table(in_process, rate) for rate in RATES),
        *(build_verdict_table(judge_in_process(in_process, rate)) for rate in RATES),
        build_rounded_table(in_process),
    ]


# --- figure


def draw_by_step(axes: Axes, table: pandas.DataFrame, arms: Sequence[str]) -> None:
    """Plot exact match against the step: a thick line for the median over seeds, and a thin line for each seed."""
    for arm in arms:
        words, colour = LOOKS[arm]
        found = table[(table["arm"] == arm) & table["exact"].notna()]
        for _, of_seed in found.groupby("seed"):
            axes.plot(of_seed["step"], of_seed["exact"], color=colour, alpha=0.25, linewidth=0.8)
        medians = found.groupby("step")["exact"].median()
        label = f"{words} ({found['seed'].nunique()})"
        axes.plot(medians.index, medians, color=colour, marker="o", label=label)
    axes.set(xlabel="step", ylabel="exact matches, held out", ylim=(0, 1))


def draw_by_eta(axes: Axes, table: pandas.DataFrame, rate: float) -> None:
    """Draw outcomes over the sampler's staleness: medians as lines, seeds as points."""
    for arm in IN_PROCESS:
        words, colour = LOOKS[arm]
        found = {eta: outcomes(table, f"{arm}-{eta}-{rate:g}")["outcome"] for eta in ETAS}
        draw_levels(axes, found, ETAS, np.median, color=colour, label=f"{words} ({SEEDS})")
    axes.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
    axes.set(xlabel="eta: steps by which the sampler is late", ylabel="exact matches, held out", ylim=(0, 1))


def draw(whole: pandas.DataFrame, in_process: pandas.DataFrame, path: Path) -> None:
    """Write the figure as a PNG; the numbers of seeds are shown in brackets."""

    def panel(title: str, draw_lines: Callable[[Axes], None]) -> FigurePanel:
        def lines(axes: Axes) -> None:
            axes.set_title(title)
            draw_lines(axes)
            add_legend(axes, columns=2)

        return FigurePanel(lines)

    panels = [
        panel("Whole runs, engine 8 updates late", lambda axes: draw_by_step(axes, whole, BY_STEP)),
        panel("Control: nothing to correct", lambda axes: draw_by_step(axes, whole, CONTROL)),
        panel("In process, sampler eta steps late", lambda axes: draw_by_eta(axes, in_process, RATES[0])),
    ]
    save(draw_panels(panels, columns=3, title="Collapse and recovery"), path, dpi=110)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    whole, in_process = results.read(), results.read(results.IN_PROCESS)
    if arguments[:1] == ["--figure"]:
        path = Path(arguments[1]) if arguments[1:] else PICTURE
        draw(whole, in_process, path)
        print(f"picture: {path.name}")
    else:
        print("\n\n".join("\n".join(table) for table in build_tables(whole, in_process)))
    return 0


if __name__ == "__main__":
    from recipe.offpolicy.process_start import answer_help

    answer_help(__doc__)
    sys.exit(main(sys.argv[1:]))
