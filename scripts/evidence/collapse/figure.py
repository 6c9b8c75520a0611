"""Draws the evidence on collapse from committed results: whole runs by step, their control, and staleness in process.

python scripts/evidence/collapse/figure.py [PNG]     # docs/collapse.png by default; panels without runs say so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):  # before imports that take seconds
    print(__doc__)
    sys.exit()

import pandas

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "evidence")]

from collapse import results  # noqa: E402
from collapse.analyse import outcomes  # noqa: E402
from collapse.late_runs import ARMS as IN_PROCESS_ARMS  # noqa: E402
from collapse.late_runs import ETAS, RATES, SEEDS  # noqa: E402

from recipe.offpolicy.analysis.pages.plotting import FigurePanel, add_legend, draw_panels, save  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = ROOT / "docs" / "collapse.png"
WHOLE = ("in_step", "late", "late_opsm", "late_decoupled", "late_both")
CONTROL = ("control", "control_both")
ALIKE = (
    ("in_step", "control"),
    ("late", "none"),
    ("late_opsm", "opsm"),
    ("late_decoupled", "decoupled"),
    ("late_both", "control_both", "both"),
    ("random",),
    ("bypass",),
)
COLOURS = {arm: f"C{number}" for number, arms in enumerate(ALIKE) for arm in arms}
"""A correction has one colour in all panels."""
WORDS = {
    "in_step": "in step, uncorrected",
    "control": "uncorrected",
    "bypass": "clip around mu (bypass)",
    "late": "uncorrected",
    "none": "uncorrected",
    "late_opsm": "OPSM",
    "opsm": "OPSM",
    "late_decoupled": "decoupled PPO",
    "decoupled": "decoupled PPO",
    "late_both": "decoupled PPO and OPSM",
    "control_both": "decoupled PPO and OPSM",
    "both": "decoupled PPO and OPSM",
    "random": "random rows, as many as OPSM",
}


def draw_by_step(axes: Axes, table: pandas.DataFrame, arms: Sequence[str]) -> None:
    """Draw exact matches over the steps: the median of the seeds thick, each seed thin."""
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
    """Draw outcomes over the staleness of the sampler: medians as lines, seeds as points; settings with all seeds."""
    for arm in IN_PROCESS_ARMS:
        found = {eta: outcomes(table, f"{arm}-{eta}-{rate:g}")["outcome"] for eta in ETAS}
        found = {eta: each for eta, each in found.items() if len(each) == SEEDS}
        if not found:
            continue
        places, medians = [ETAS.index(eta) for eta in found], [each.median() for each in found.values()]
        axes.plot(places, medians, color=COLOURS[arm], marker="o", label=f"{WORDS[arm]} ({SEEDS})")
        for place, each in zip(places, found.values(), strict=True):
            axes.plot([place] * len(each), each, ".", color=COLOURS[arm], alpha=0.35)
    axes.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
    axes.set(xlabel="eta: steps by which the sampler is late", ylabel="exact matches, held out", ylim=(0, 1))


def draw(whole: pandas.DataFrame, in_process: pandas.DataFrame, path: Path) -> None:
    """Write the figure as a PNG; in brackets the number of seeds."""

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
    sys.exit(main(sys.argv[1:]))
