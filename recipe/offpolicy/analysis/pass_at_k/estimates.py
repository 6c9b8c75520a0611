"""Estimates of pass@k of dumps: as tables, as JSON, and as a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...extensions.pass_at_k.estimators import RankingOnly, rank
from ...extensions.pass_at_k.summary import Stopping, Summary, summarize
from ..pages import Column, Table
from ..pages.panels import Axis, Mark, Panel
from ..pages.plotting import PALETTE, draw_panels
from .dumps import Counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Estimates:
    """pass@k of one step.

    Attributes:
        name: name of the checkpoint.
        ranking: k -> the mean of the Bernoulli formula, for ranking alone.
        notes: what has to be known next to the numbers.
    """

    step: int
    name: str
    summary: Summary
    ranking: dict[int, RankingOnly]
    notes: tuple[str, ...]


def estimate(
    counts: Counts, ks: Sequence[int], *, extrapolate: Sequence[int], stopping: Stopping | None, ranking: bool
) -> Estimates:
    """Estimate pass@k of one step's counts.

    Raises:
        ValueError: counts that the rule of stopping cannot give.
    """
    summary = summarize(counts.n, counts.c, ks, extrapolate=extrapolate, stopping=stopping)
    return Estimates(
        counts.step,
        counts.name,
        summary,
        {k: _mean_rank(counts, k) for k in (*ks, *extrapolate)} if ranking else {},
        tuple(_list_notes(counts, summary, stopping)),
    )


def _mean_rank(counts: Counts, k: int) -> RankingOnly:
    values = [rank(n, c, k).value for n, c in zip(counts.n, counts.c, strict=True)]
    return RankingOnly(sum(values) / len(values))


def _list_notes(counts: Counts, summary: Summary, stopping: Stopping | None) -> list[str]:
    notes = []
    least, most = min(counts.n), max(counts.n)
    if counts.pooled:
        notes.append(f"{counts.pooled} prompts stand more than once in the data set, and count as one each.")
    elif not counts.named and least < most:
        notes.append(
            f"The dumps name no prompts: {summary.prompts} are told apart by input and ground truth, with {least} to "
            f"{most} samples. A prompt that stands twice in the data set counts as one."
        )
    if stopping is None and least < most:
        notes.append(
            f"Prompts have {least} to {most} samples. If sampling ended early by what was found, these estimates are "
            f"too large: pass --looks and --successes."
        )
    if summary.left_out:
        ks = ", ".join(map(str, summary.left_out))
        notes.append(f"k = {ks}: more than the samples of some prompt; --extrapolate estimates by a fit.")
    if summary.not_identified:
        notes.append(f"Nothing is extrapolated: not identified, {summary.not_identified}")
    elif summary.fit is not None:
        notes.append(f"Extrapolated by rates of success from Beta({summary.fit.a:.3g}, {summary.fit.b:.3g}).")
    return notes


def build_table(found: Estimates) -> Table:
    """Build the table of one step."""
    columns = [Column("k"), Column("pass@k"), Column("low"), Column("high"), Column("by")]
    rows: list[list[Any]] = [[k, *point, "unbiased"] for k, point in found.summary.points.items()]
    if found.summary.fit is not None:
        rows += [[k, *point, "fit"] for k, point in found.summary.fit.points.items()]
    if found.ranking:
        columns.append(Column("Bernoulli (ranking only)", align="right"))
        rows = [[*row, str(found.ranking[row[0]])] for row in rows]
    summary = found.summary
    counted = f"{summary.prompts} prompts, {summary.samples} samples, {summary.unsolved:.1%} unsolved"
    title = f"{found.name[0].upper()}{found.name[1:]}: {counted}"
    return Table(columns, rows, title)


def build_json(found: Estimates) -> dict[str, Any]:
    """Build the JSON of one step."""
    summary, fit = found.summary, found.summary.fit

    def point(values: tuple[float, float, float]) -> dict[str, float | None]:
        named = zip(("estimate", "low", "high"), values, strict=True)
        return {name: None if math.isnan(value) else value for name, value in named}

    return {
        "step": found.step,
        "prompts": summary.prompts,
        "samples": summary.samples,
        "unsolved_share": summary.unsolved,
        "pass_at_k": {str(k): point(values) for k, values in summary.points.items()},
        "beta": None if fit is None else {"a": fit.a, "b": fit.b},
        "extrapolated": {} if fit is None else {str(k): point(values) for k, values in fit.points.items()},
        "not_identified": summary.not_identified or None,
        "ranking_only": {str(k): each.value for k, each in found.ranking.items()},
        "notes": list(found.notes),
    }


def draw_curves(found: Sequence[Estimates]) -> Figure:
    """Draw pass@k over k of each step, with intervals, the fit dashed."""
    marks = []
    for number, each in enumerate(found):
        fit = each.summary.fit
        drawn = {"unbiased": ("-", each.summary.points)} | ({} if fit is None else {"by the fit": ("--", fit.points)})
        for name, (dash, points) in drawn.items():
            ks = sorted(points)
            value, low, high = ([points[k][at] for k in ks] for at in range(3))
            look: Any = {"colour": PALETTE[number % len(PALETTE)], "dash": dash, "marker": "o"}
            marks.append(Mark(ks, value, f"{each.name}, {name}", band=(low, high), **look))
    x, y = Axis("k", log=2), Axis("pass@k", limits=(0.0, 1.02))
    return draw_panels([Panel("pass@k", "pass@k over k, with 95 % intervals over prompts", x, y, marks)])
