"""Counts of correct answers in verl's validation dumps, and their pass@k as tables, JSON and a curve."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...extensions.pass_at_k.estimators import RankingOnly, rank
from ...extensions.pass_at_k.summary import Stopping, Summary, summarize
from ...extensions.sessions import DumpError, drop_repeated, find_run, name_runs, read_dump, round_threshold
from ..plotting import PALETTE, Axis, Mark, Panel, draw_panels
from ..table import Column, Table, to_plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Prompt = tuple[str, str]
"""The input and the ground truth, which together identify a prompt."""


@dataclass(frozen=True)
class Counts:
    """Number of samples, and of correct samples, of each prompt at one step.

    Attributes:
        step: step of the trainer.
        n, c: number of samples, and of correct samples, of each prompt.
        pooled: number of prompts that the data set contains more than once, as far as the dumps show this.
        named: whether the dumps identify prompts by uid.
        prompts: identity of each prompt.
        run: the name of the dumps' folder, see ``validation_dumps.name_runs``.
    """

    step: int
    n: list[int]
    c: list[int]
    pooled: int
    named: bool
    prompts: list[Prompt]
    run: str = ""

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return f"{self.run}step {self.step}"


@dataclass
class _Prompt:
    scores: list[float] = field(default_factory=list)
    uids: Counter[tuple[str, str]] = field(default_factory=Counter)


def read_dumps(paths: Sequence[Path], *, correct_at_least: float) -> list[Counts]:
    """Read dumps, one ``Counts`` per folder and step; later rounds of dynamic validation add samples to prompts.

    Prompts are distinguished by input and ground truth. Dumps of the V1 trainer also show whether a data set contains a
    prompt twice.

    Raises:
        DumpError: a line does not belong to a dump.
        OSError: a file cannot be read.
    """
    steps: dict[tuple[str, int], dict[Prompt, _Prompt]] = {}
    named = True
    for path in drop_repeated(paths):
        folder = find_run(path)
        sessions: set[str] = set()
        for row in read_dump(path):
            uid = row.get("uid")
            named &= uid is not None
            if uid is not None:
                session, _, _ = str(uid).rpartition("_")
                if session in sessions:
                    continue
                sessions.add(session)
            key = (str(row["input"]), json.dumps(row.get("gts"), sort_keys=True))
            prompt = steps.setdefault((folder, row["step"]), {}).setdefault(key, _Prompt())
            prompt.scores.append(float(row["score"]))
            if uid is not None:
                prompt.uids[str(path), session.rpartition("_")[0]] += 1
    if not steps:
        raise DumpError(f"{', '.join(map(str, paths))}: no sample was found.")
    runs = name_runs(folder for folder, _ in steps)
    return [
        _count(step, prompts, correct_at_least, named, runs[folder])
        for (folder, step), prompts in sorted(steps.items())
    ]


def _count(step: int, of: Mapping[Prompt, _Prompt], correct_at_least: float, named: bool, run: str) -> Counts:
    prompts = of.values()

    def is_pooled(prompt: _Prompt) -> bool:
        by_file = Counter(path for path, _ in prompt.uids)
        return any(count > 1 for count in by_file.values())

    return Counts(
        step,
        [len(prompt.scores) for prompt in prompts],
        [sum(score >= round_threshold(correct_at_least) for score in prompt.scores) for prompt in prompts],
        sum(map(is_pooled, prompts)),
        named,
        list(of),
        run,
    )


@dataclass(frozen=True)
class Estimates:
    """pass@k of one step.

    Attributes:
        name: name of the checkpoint.
        ranking: k -> the mean of the Bernoulli formula, only for ranking.
        notes: sentences that help to interpret the numbers.
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
        ValueError: the counts are impossible under the stopping rule.
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
        notes.append(f"The data set contains {counts.pooled} prompts more than once; each counts as one prompt.")
    elif not counts.named and least < most:
        notes.append(
            f"The dumps do not identify prompts: {summary.prompts} are distinguished by input and ground truth, with "
            f"{least} to {most} samples. A prompt that the data set contains twice counts as one prompt."
        )
    if stopping is None and least < most:
        notes.append(
            f"Prompts have {least} to {most} samples. If sampling stopped early because of its results, these "
            f"estimates are too large: pass --looks and --successes."
        )
    if summary.left_out:
        ks = ", ".join(map(str, summary.left_out))
        notes.append(f"k = {ks}: some prompts have fewer samples; --extrapolate estimates pass@k by a fit.")
    if summary.not_identified:
        notes.append(f"Nothing is extrapolated, because the fit is not identified: {summary.not_identified}")
    elif summary.fit is not None:
        notes.append(
            f"Larger k are extrapolated with success rates distributed as Beta({summary.fit.a:.3g}, "
            f"{summary.fit.b:.3g})."
        )
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
    document = {
        "step": found.step,
        "prompts": summary.prompts,
        "samples": summary.samples,
        "unsolved_share": summary.unsolved,
        "pass_at_k": {k: name_interval(values) for k, values in summary.points.items()},
        "beta": None if fit is None else {"a": fit.a, "b": fit.b},
        "extrapolated": {} if fit is None else {k: name_interval(values) for k, values in fit.points.items()},
        "not_identified": summary.not_identified or None,
        "ranking_only": {k: each.value for k, each in found.ranking.items()},
        "notes": found.notes,
    }
    return dict(to_plain(document))


def name_interval(values: tuple[float, float, float]) -> dict[str, float]:
    """Map the names of an estimate and its interval to their values."""
    return dict(zip(("estimate", "low", "high"), values, strict=True))


def draw_curves(found: Sequence[Estimates]) -> Figure:
    """Plot pass@k over k for each step, with intervals, and with the fit as a dashed line."""
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
