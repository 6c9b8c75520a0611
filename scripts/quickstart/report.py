"""Summary table and figure at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe.offpolicy.analysis.pages.plotting import FigurePanel, add_legend, draw_panels, save
from recipe.offpolicy.analysis.pages.table import Column, Table

from .metrics import ESS, FIRST_VALUE, KEPT, KL, REWARD, SECONDS, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPTIONAL = (
    {
        "share of rollouts taught": "opd/frac_opd_samples",
        "gap to the teacher, nats": "opd/gap/mean",
        "teacher's share of the pull": "opd/share_of_loss",
    },
    {
        "value of the prompt, nats": FIRST_VALUE,
        "value of the whole, passed": "process_reward/value/last/passed",
        "value of the whole, failed": "process_reward/value/last/failed",
        "seconds of scoring a step": "process_reward/cost/seconds",
    },
)
"""Rows of the summary that are shown where one of them has a value."""


def describe(correction: dict[str, Any]) -> str:
    """Describe the configured correction briefly, for instance "token weights (truncate), masks gsm and opsm"."""
    parts = []
    if weight := correction.get("weight"):
        parts.append(f"{weight['level']} weights ({weight['kind']})")
    if weights := correction.get("weights"):
        signed = (f"{each['level']} weights of {each['when']} advantage" for each in weights.values())
        parts.append(" and ".join(signed))
    if masks := correction.get("masks"):
        parts.append(f"mask{'s' if len(masks) > 1 else ''} {' and '.join(masks)}")
    if correction.get("proximal", "recompute") != "recompute":
        parts.append(f"pi_old by {correction['proximal']}")
    named = {"kl_clip": "clipped KL", "kl_weight": "weighed KL", "penalty": "a penalty on the log-ratio"}
    return ", ".join([*parts, *(name for key, name in named.items() if correction.get(key))]) or "uncorrected"


def _name_ess(history: History) -> str:
    return f"effective sample size{'' if history.ess == ESS else ' of pi_old/mu'}"


def _name_reward(history: History) -> str:
    return f"{'graded score' if 'exact match' in history.heldout else 'reward'}, sampled"


def build_summary_table(history: History, *, corrected: bool) -> Table:
    """Build the table of first and last values."""
    named = {f"held-out {name}": [value for _, value in each] for name, each in history.heldout.items()}
    keys = {_name_reward(history): REWARD, "mismatch KL (k3)": KL, _name_ess(history): history.ess}
    named |= {
        name: history.series(key) for name, key in (keys | {"kept share": KEPT, "seconds a step": SECONDS}).items()
    }
    for optional in OPTIONAL:
        series = {name: history.series(key) for name, key in optional.items()}
        if not np.isnan([*series.values()]).all():
            named |= series
    rows: list[list[Any]] = []
    for name, found in named.items():
        values = [value for value in found if not math.isnan(value)]
        rows.append([name, values[0], values[-1]] if values else [name, None, None])
    proof = "none configured" if not corrected else "yes" if history.proved else "NO"
    columns = [Column(""), Column("first", align="right"), Column("last", align="right")]
    return Table(columns, [*rows, ["correction proved live", "", proof]], "Quickstart")


def draw(history: History, path: Path, title: str) -> None:
    """Plot reward, mismatch and kept share over the steps, as a PNG."""
    import pandas
    from matplotlib.ticker import MaxNLocator

    steps = history.steps

    def reward(axes: Axes) -> None:
        values = history.series(REWARD)
        axes.plot(steps, values, color="C0", alpha=0.35, label=_name_reward(history))
        # NaN does not count.
        smooth = pandas.Series(values, dtype=float).rolling(5, min_periods=1).mean()
        axes.plot(steps, smooth, color="C0", label="mean of 5 steps")
        looks = (("o", "C1", -15), ("s", "C0", 8))
        for (name, each), (marker, colour, up) in zip(history.heldout.items(), looks, strict=False):
            for step, value in each:
                place = (step, value), (-10, up)
                axes.annotate(f"{value:.2f}", *place, textcoords="offset points", color=colour)
            axes.plot(*np.array(each).reshape(-1, 2).T, marker, color=colour, label=f"{name}, held out")
        axes.set(title="Answers", ylim=(0, 1.05), ylabel="mean of all answers")

    def mismatch(axes: Axes) -> None:
        axes.plot(steps, [1e4 * value for value in history.series(KL)], color="C1")
        axes.set(title="Mismatch of trainer and engine", ylabel="KL (k3) per token, $10^{-4}$ nats")
        axes.set_ylim(bottom=0)

    def kept(axes: Axes) -> None:
        axes.plot(steps, history.series(KEPT), color="C2", label="tokens kept by the masks")
        axes.plot(steps, history.series(history.ess), color="C6", linestyle="--", label=_name_ess(history))
        axes.set(title="Kept share")

    def panel(draw_lines: Callable[[Axes], None]) -> FigurePanel:
        def draw_all(axes: Axes) -> None:
            draw_lines(axes)
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            add_legend(axes, columns=3)

        return FigurePanel(draw_all, "")

    save(draw_panels([panel(lines) for lines in (reward, mismatch, kept)], columns=3, title=title), path, dpi=150)
