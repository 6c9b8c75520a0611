"""pass@k from verl's validation dumps, and a ranking of checkpoints with simultaneous intervals for all pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..extensions.batch_view import round_threshold
from ..extensions.pass_at_k.estimates import (
    NotIdentified,
    Stopping,
    Summary,
    extrapolate,
    fit,
    maximise_likelihood,
    rank,
    summarize,
    unbiased,
    unbiased_dynamic,
)
from ..extensions.validation_answers import DumpError, drop_repeated, find_run, name_runs, read_dump
from . import AnalysisError
from .page import Block
from .plotting import PALETTE, Axis, Mark, Panel
from .table import Column, Table

Prompt = tuple[str, str]
"""The input and the ground truth, which together identify a prompt."""
Interval = tuple[float, float, float]
"""An estimate, and the lower and upper end of its interval."""
DRAWS, LEVEL, LEAST_PROMPTS = 2000, 0.95, 10
"""Number of bootstrap draws, level of the intervals, and minimum number of prompts for separating checkpoints."""
FIT_DRAWS = 400


@dataclass(frozen=True)
class Counts:
    """Number of samples and number of correct samples of each prompt at one step.

    Attributes:
        step: step of the trainer.
        n, c: number of samples and number of correct samples of each prompt.
        prompts: identity of each prompt.
        run: the name of the dumps' folder, see ``validation_answers.name_runs``.
        doubled: number of prompts that the data set contains more than once, if the dumps show it.
        named: whether the dumps identify prompts by uid.
    """

    step: int
    n: list[int]
    c: list[int]
    prompts: list[Prompt]
    run: str = ""
    doubled: int = 0
    named: bool = True

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return f"{self.run}step {self.step}"


def read_dumps(paths: Sequence[Path], *, correct_at_least: float) -> list[Counts]:
    """Read dumps, one ``Counts`` per folder and step; later rounds of dynamic validation add samples to prompts.

    Prompts are distinguished by input and ground truth, so a prompt that a data set contains twice counts as one. Dumps
    of the V1 trainer also show whether a prompt is repeated.

    Raises:
        DumpError: a line does not belong to a dump.
        OSError: a file cannot be read.
    """
    steps: dict[tuple[str, int], dict[Prompt, list[float]]] = {}
    doubled: dict[tuple[str, int], set[Prompt]] = {}
    named = True
    for path in drop_repeated(paths):
        folder = find_run(path)
        sessions: set[str] = set()
        owners: dict[tuple[int, Prompt], str] = {}
        for row in read_dump(path):
            # The uid in a dump of the V1 trainer is prompt_session_output; a session counts once.
            session = str(row.get("uid")).rpartition("_")[0]
            if session and session in sessions:
                continue
            sessions.add(session)
            named &= row.get("uid") is not None
            step, key = (folder, row["step"]), (str(row["input"]), json.dumps(row.get("gts"), sort_keys=True))
            steps.setdefault(step, {}).setdefault(key, []).append(float(row["score"]))
            owner = session.rpartition("_")[0]
            if owners.setdefault((row["step"], key), owner) != owner:
                doubled.setdefault(step, set()).add(key)
    if not steps:
        raise DumpError(f"{', '.join(map(str, paths))}: no sample was found.")
    runs, least = name_runs(folder for folder, _ in steps), round_threshold(correct_at_least)
    return [
        Counts(
            step,
            [len(scores) for scores in prompts.values()],
            [sum(score >= least for score in scores) for scores in prompts.values()],
            list(prompts),
            runs[folder],
            len(doubled.get((folder, step), ())),
            named,
        )
        for (folder, step), prompts in sorted(steps.items())
    ]


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
    ranking: dict[int, float]
    notes: tuple[str, ...]


def estimate(
    counts: Counts, ks: Sequence[int], *, extrapolate: Sequence[int], stopping: Stopping | None, ranking: bool
) -> Estimates:
    """Estimate pass@k of one step's counts.

    Raises:
        ValueError: the counts are impossible under the stopping rule.
    """
    summary = summarize(counts.n, counts.c, ks, extrapolate=extrapolate, stopping=stopping)
    by_rank = {}
    for k in (*ks, *extrapolate) if ranking else ():
        values = [rank(n, c, k) for n, c in zip(counts.n, counts.c, strict=True)]
        by_rank[k] = sum(values) / len(values)
    return Estimates(counts.step, counts.name, summary, by_rank, tuple(_list_notes(counts, summary, stopping)))


def _list_notes(counts: Counts, summary: Summary, stopping: Stopping | None) -> list[str]:
    notes = []
    least, most = min(counts.n), max(counts.n)
    if counts.doubled:
        notes.append(f"The data set contains {counts.doubled} prompts more than once; each counts as one prompt.")
    elif not counts.named and least < most:
        notes.append(
            f"The dumps do not identify prompts: {summary.prompts} prompts are distinguished by input and ground "
            f"truth, with "
            f"{least} to {most} samples. A prompt that the data set contains twice counts as one prompt."
        )
    if stopping is None and least < most:
        notes.append(
            f"Prompts have {least} to {most} samples. If sampling stopped early because of its results, these "
            "estimates are too large: pass --looks and --successes."
        )
    if summary.left_out:
        ks = ", ".join(map(str, summary.left_out))
        notes.append(f"k = {ks}: some prompts have fewer samples; --extrapolate estimates pass@k by a fit.")
    if summary.not_identified:
        notes.append(f"Nothing is extrapolated, because the fit is not identified: {summary.not_identified}")
    elif summary.fit is not None:
        notes.append(
            f"For larger k, pass@k is extrapolated from a Beta-binomial fit: success rates are distributed as "
            f"Beta({summary.fit.a:.3g}, "
            f"{summary.fit.b:.3g})."
        )
    return notes


def build_table(found: Estimates) -> Table:
    """Build the table of one step."""
    summary, fitted = found.summary, found.summary.fit
    columns = [Column("k"), Column("pass@k"), Column("low"), Column("high"), Column("by")]
    rows: list[list[Any]] = [[k, *point, "unbiased"] for k, point in summary.points.items()]
    rows += [[k, *point, "fit"] for k, point in fitted.points.items()] if fitted is not None else []
    if found.ranking:
        columns.append(Column("Bernoulli (ranking only)", align="right"))
        rows = [[*row, f"{found.ranking[row[0]]:.3f}"] for row in rows]
    counted = f"{summary.prompts} prompts, {summary.samples} samples, {summary.unsolved:.1%} unsolved"
    return Table(columns, rows, f"{found.name[0].upper()}{found.name[1:]}: {counted}")


def build_blocks(found: Sequence[Estimates], ranking: Ranking | None) -> list[Block]:
    """Build the tables, the notes and the panel for all steps and for their ranking."""
    blocks: list[Block] = []
    for each in found:
        blocks += [build_table(each), *each.notes]
    if ranking is not None:
        blocks += [build_ranking(ranking), *ranking.notes]
    return [*blocks, plot_curves(found)]


def build_document(found: Sequence[Estimates], ranking: Ranking | None) -> list[dict[str, Any]]:
    """Build the JSON document: one entry per step, with its place if the steps are ranked."""
    places = {} if ranking is None else _describe_places(ranking)
    return [_describe(each) | ({"ranking": places[each.name]} if places else {}) for each in found]


def _describe(found: Estimates) -> dict[str, Any]:
    summary, fitted = found.summary, found.summary.fit
    return {
        "step": found.step,
        "prompts": summary.prompts,
        "samples": summary.samples,
        "unsolved_share": summary.unsolved,
        "pass_at_k": {k: _name_interval(values) for k, values in summary.points.items()},
        "beta": None if fitted is None else {"a": fitted.a, "b": fitted.b},
        "extrapolated": {} if fitted is None else {k: _name_interval(values) for k, values in fitted.points.items()},
        "not_identified": summary.not_identified or None,
        "ranking_only": found.ranking,
        "notes": found.notes,
    }


def _describe_places(found: Ranking) -> dict[str, dict[str, Any]]:
    shared = {"k": found.k, "by": found.by, "pairs": found.pairs, "width": found.width, "notes": found.notes}
    return {
        each.name: {
            "place": each.number,
            "value": _name_interval(each.value),
            "behind_first": _name_interval(each.behind),
            "may_be_best": each.may_be_best,
            **shared,
        }
        for each in found.places
    }


def _name_interval(values: Interval) -> dict[str, float]:
    return dict(zip(("estimate", "low", "high"), values, strict=True))


def plot_curves(found: Sequence[Estimates]) -> list[Panel]:
    """Plot pass@k over k for each step, with intervals, and with the fit as a dashed line."""
    marks = []
    for number, each in enumerate(found):
        fitted = each.summary.fit
        drawn = {"unbiased": ("-", each.summary.points)}
        drawn |= {} if fitted is None else {"by the fit": ("--", fitted.points)}
        for name, (dash, points) in drawn.items():
            ks = sorted(points)
            value, low, high = ([points[k][at] for k in ks] for at in range(3))
            look: Any = {"colour": PALETTE[number % len(PALETTE)], "dash": dash, "marker": "o"}
            marks.append(Mark(ks, value, f"{each.name}, {name}", band=(low, high), **look))
    x, y = Axis("k", log=2), Axis("pass@k", limits=(0.0, 1.02))
    return [Panel("pass@k", "pass@k over k, with 95 % intervals over prompts", x, y, marks)]


@dataclass(frozen=True)
class Place:
    """One checkpoint of a ranking.

    Attributes:
        number: rank of the checkpoint, from 1; checkpoints with equal statistics share a rank.
        value: the checkpoint's statistic (see ``Ranking.by``), with the 95 % interval of this statistic alone.
        behind: difference from the first place, with an interval that is valid for all pairs simultaneously.
        may_be_best: whether no other checkpoint is significantly better, i.e. by a difference whose whole interval lies
        above 0.
    """

    number: int
    name: str
    value: Interval
    behind: Interval
    may_be_best: bool


@dataclass(frozen=True)
class Ranking:
    """Checkpoints in descending order.

    Attributes:
        by: the statistic: unbiased, fit, or Bernoulli, which is only for ranking and not an estimate.
        prompts: number of prompts that all checkpoints have answered.
        pairs: number of comparisons for which the intervals are corrected.
        width: half width of each pair's interval, in units of the pair's standard error.
        notes: sentences that help to interpret the ranking.
    """

    k: int
    by: str
    prompts: int
    pairs: int
    width: float
    places: tuple[Place, ...]
    notes: tuple[str, ...]


def rank_checkpoints(
    checkpoints: Sequence[Counts], k: int, *, stopping: Stopping | None = None, draws: int = DRAWS
) -> Ranking:
    """Rank checkpoints by pass@k on the prompts that all of them answered.

    One bootstrap over prompts resamples all checkpoints together, so the effect of prompts that are hard for all
    checkpoints cancels. The interval of a pair is its difference +- q standard errors. Here, q is the 95 % quantile of
    the largest |deviation| / standard error over all pairs (max-t). The probability that any interval misses the true
    difference is therefore 5 %, and so is the probability that the best checkpoint is not among those that may be best.

    Raises:
        AnalysisError: no common prompt, or a fit that is not identified.
        ValueError: the counts are impossible under the stopping rule.
    """
    order = sorted(set.intersection(*(set(each.prompts) for each in checkpoints)))
    if not order:
        raise AnalysisError("the checkpoints have no prompt in common, so they cannot be compared.")
    found = [dict(zip(each.prompts, zip(each.n, each.c, strict=True), strict=True)) for each in checkpoints]
    counts = torch.tensor([[each[prompt] for prompt in order] for each in found])
    by, notes = _choose(counts, k, stopping)
    weights = _draw(len(order), FIT_DRAWS if by == "fit" else draws)
    own, drawn = (_fit if by == "fit" else _average)(counts, k, weights, by, stopping)
    few = len(order) < LEAST_PROMPTS
    if dropped := max(len(each.prompts) for each in checkpoints) - len(order):
        notes.append(f"{dropped} prompts are excluded, because some checkpoints did not answer them.")
    if few:
        notes.append(f"{len(order)} prompts are too few to separate checkpoints; at least {LEAST_PROMPTS} are needed.")
    differences, errors, width = _compare(own, drawn)
    margin = width * errors
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=1)
    best = (differences + margin >= 0).all(1)
    if few:
        low, high, margin, best = low * math.nan, high * math.nan, margin * math.nan, torch.ones_like(best)
    falling = sorted(range(len(checkpoints)), key=lambda at: (-float(own[at]), checkpoints[at].name))
    first = falling[0]

    def build_place(at: int) -> Place:
        value = float(own[at])
        behind, half = float(differences[at, first]), float(margin[at, first]) if at != first else 0.0
        return Place(
            number=1 + int((own > value + 1e-12).sum()),
            name=checkpoints[at].name,
            value=(value, float(low[at]), float(high[at])),
            behind=(behind, behind - half, behind + half),
            may_be_best=bool(best[at]),
        )

    pairs = len(checkpoints) * (len(checkpoints) - 1) // 2
    notes.append(
        f"{len(checkpoints)} checkpoints, {pairs} pairs: the intervals of differences from the first checkpoint are "
        f"simultaneous over all pairs, at 95 % (+- {width:.2f} standard errors). The best checkpoint is one of those "
        "that may be best, at 95 %. The value of the first checkpoint is too high on average, because it was selected "
        "by the same samples."
    )
    return Ranking(k, by, len(order), pairs, width, tuple(map(build_place, falling)), tuple(notes))


def _choose(counts: Tensor, k: int, stopping: Stopping | None) -> tuple[str, list[str]]:
    """Choose the statistic for counts of shape (M, P, 2), with notes on the choice."""
    samples = counts[..., 0]
    least, most = int(samples.min()), int(samples.max())
    if k <= (stopping.looks[-1] if stopping else least):
        return "unbiased", []
    if stopping is None and least == most:
        return "Bernoulli", [
            f"k={k} exceeds the {least} samples: 1 - (1 - c/n)^k ranks checkpoints, but does not estimate pass@{k}. "
            "The larger k is, the more the ranking depends on the share of prompts with a correct sample."
        ]
    varied = (
        "" if stopping else f" Prompts have {least} to {most} samples, and 1 - (1 - c/n)^k depends on their number."
    )
    return "fit", [f"k={k} exceeds the number of samples: pass@k is extrapolated by a Beta-binomial fit.{varied}"]


def _draw(prompts: int, draws: int) -> Tensor:
    """Draw how often each prompt occurs in each resample, (D, P) float64."""
    chosen = torch.randint(prompts, (draws, prompts), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(draws, prompts, dtype=torch.float64)
    return weights.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))


def _average(counts: Tensor, k: int, weights: Tensor, by: str, stopping: Stopping | None) -> tuple[Tensor, Tensor]:
    """Compute mean estimates over prompts, (M,), and the same for each draw, (M, D)."""

    def estimate(n: int, c: int) -> float:
        if by == "Bernoulli":
            return rank(n, c, k)
        if stopping is None:
            return unbiased(n, c, k)
        return unbiased_dynamic(stopping.looks, n, c, k, successes=stopping.successes)

    values = torch.tensor([[estimate(n, c) for n, c in each] for each in counts.tolist()], dtype=torch.float64)
    return values.mean(1), values @ weights.T / weights.shape[1]


def _fit(counts: Tensor, k: int, weights: Tensor, by: str, stopping: Stopping | None) -> tuple[Tensor, Tensor]:
    """Compute the fit's pass@k, (M,), and the same for each draw in which all checkpoints are identified, (M, D)."""
    own, drawn, found = [], [], torch.ones(len(weights), dtype=torch.bool)
    for each in counts.double():
        try:
            own.append(extrapolate(*fit(each[:, 0], each[:, 1]), k))
        except NotIdentified as error:
            raise AnalysisError(
                f"k={k} exceeds the number of samples, and the fit is not identified: {error}"
            ) from error
        pairs, place = torch.unique(each, dim=0, return_inverse=True)
        of_pairs = torch.zeros(len(weights), len(pairs), dtype=torch.float64).index_add_(1, place, weights)
        a, b, identified = maximise_likelihood(pairs[:, 0], pairs[:, 1], of_pairs)
        found &= identified
        drawn.append(1 - (torch.lgamma(b + k) - torch.lgamma(b) - torch.lgamma(a + b + k) + torch.lgamma(a + b)).exp())
    if float(found.double().mean()) < LEVEL:
        raise AnalysisError(f"k={k}: the fit is identified in too few resamples of the prompts. Draw more samples.")
    return torch.tensor(own, dtype=torch.float64), torch.stack(drawn)[:, found]


def _compare(own: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compute differences (M, M), their standard errors (M, M), and the quantile q of ``rank_checkpoints``."""
    differences = own[:, None] - own[None]
    drawn = drawn[:, None] - drawn[None]
    errors = drawn.std(-1)
    # If the standard error of a pair is 0, its difference does not vary at all.
    varies = (errors > 1e-12)[..., None]
    scaled = (drawn - differences[..., None]).abs() / errors.clamp(min=1e-12)[..., None]
    largest = torch.where(varies, scaled, 0.0).amax((0, 1))
    return differences, errors, float(torch.quantile(largest, LEVEL))


def build_ranking(found: Ranking) -> Table:
    """Build the table of a ranking."""
    names = ("place", "checkpoint", f"pass@{found.k}", "low", "high", "behind first", "low", "high", "may be best")
    rows = [[each.number, each.name, *each.value, *each.behind, each.may_be_best] for each in found.places]
    title = f"Ranking by pass@{found.k} ({found.by}), {found.prompts} common prompts"
    return Table([Column(name) for name in names], rows, title)
