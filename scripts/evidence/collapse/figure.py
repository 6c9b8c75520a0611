"""Draws the evidence on collapse from committed results: whole runs by step, their control, and staleness in process.

python scripts/evidence/collapse/figure.py [PNG]     # docs/collapse.png by default; a panel without runs says so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results
from collapse.analyse import outcomes
from collapse.arms import ETAS, IN_PROCESS, RATES, SEEDS
from seeds import draw_levels

from recipe.offpolicy.analysis.pages.plotting import FigurePanel, add_legend, draw_panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = ROOT / "docs" / "collapse.png"
WHOLE = ("in_step", "late", "late_opsm", "late_decoupled", "late_both")
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

        return FigurePanel(lines, "")

    panels = [
        panel("Whole runs, engine 8 updates late", lambda axes: draw_by_step(axes, whole, WHOLE)),
        panel("Control: nothing to correct", lambda axes: draw_by_step(axes, whole, CONTROL)),
        panel("In process, sampler eta steps late", lambda axes: draw_by_eta(axes, in_process, RATES[0])),
    ]
    save(draw_panels(panels, columns=3, title="Collapse and recovery"), path, dpi=110)


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    path = Path(arguments[0]) if arguments else PICTURE
    draw(results.read(), results.read(results.IN_PROCESS), path)
    print(f"picture: {path.name}")
    return 0


if __name__ == "__main__":
    from recipe.offpolicy.usage import answer_help

    answer_help(__doc__)
    sys.exit(main(sys.argv[1:]))
