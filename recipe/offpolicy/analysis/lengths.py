"""Answer lengths by correctness over steps, and reward by length, for early and late steps or for classes of
prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..extensions import validation_answers
from ..extensions.batch_view import round_threshold
from ..extensions.length_penalty.penalties import CLASSES, summarize_lengths
from ..extensions.validation_answers import drop_repeated, find_run, name_runs, read_answers, read_lines
from ..recording import Recording, Rows
from ..recording.schema import concatenate
from . import AnalysisError
from .plotting import PALETTE, Axis, Mark, Panel
from .table import Column, Table

Array = NDArray[np.float64]

REWARD = ("critic/score/mean", "critic/rewards/mean")
LENGTH = "response_length/mean"
NAMES = ("all", *CLASSES)
TITLES = {
    "all": "all answers",
    "right": "right answers",
    "wrong": "wrong answers",
    "easy": "easy prompts (0.9 or more correct)",
    "hard": "hard prompts (0.1 or less correct)",
}
BINS, LEAST = 8, 20
"""Number of length bins, each with the same share of all answers, and minimum number of answers for a bin to have a
value."""


@dataclass(frozen=True)
class LengthStep:
    """Mean length for each of ``NAMES`` at one step (NaN if no answer belongs to the name), and the mean reward."""

    step: int
    lengths: Mapping[str, float]
    reward: float


@dataclass(frozen=True)
class Answers:
    """Answers of one checkpoint, or of several training steps.

    Attributes:
        prompts, tokens, rewards: (n,) prompt, number of tokens and reward of each answer.
    """

    label: str
    prompts: NDArray[np.object_]
    tokens: Array
    rewards: Array

    def of(self, prompts: set[str]) -> Answers:
        """Select the answers to some prompts."""
        chosen = np.array([prompt in prompts for prompt in self.prompts], dtype=bool)
        return Answers(self.label, self.prompts[chosen], self.tokens[chosen], self.rewards[chosen])


class Curve(NamedTuple):
    """Each bin's mean tokens, mean reward with 95 % interval, and share of answers; NaN in bins of too few answers."""

    tokens: Array
    reward: Array
    low: Array
    high: Array
    share: Array


def read_curves(path: Path, *, correct_at_least: float) -> list[LengthStep]:
    """Read the curves of a file of metrics (verl's logger ``file``), or of a recording's directory.

    Raises:
        AnalysisError: there are no curves in it.
        RecordingError, OSError: it cannot be read.
    """
    if path.is_dir():
        recording = Recording(path)
        whole = (concatenate([part.rows for part in recording.parts(step)]) for step in recording.steps)
        return [measure_rows(rows, correct_at_least) for rows in whole]
    found: list[LengthStep] = []
    fix = "Name a file of metrics from verl's file logger, or the directory of a recording."
    for number, line in read_lines(path, AnalysisError, fix):
        try:
            step, data = int(line["step"]), dict(line["data"])
        except (KeyError, TypeError, ValueError) as error:
            raise AnalysisError(
                f"{path}, line {number}: this line was not written by verl's file logger ({error!r}). {fix}"
            ) from error
        if LENGTH not in data:
            continue
        # verl's logger writes null for NaN.
        known = {key: float(value) for key, value in data.items() if isinstance(value, int | float)}
        keys = {"all": LENGTH} | {name: f"length/{name}/mean" for name in CLASSES}
        lengths = {name: known.get(key, math.nan) for name, key in keys.items()}
        found.append(LengthStep(step, lengths, next((known[key] for key in REWARD if key in known), math.nan)))
    if not found:
        raise AnalysisError(f"{path}: no step records {LENGTH}.")
    return found


def measure_rows(rows: Rows, correct_at_least: float) -> LengthStep:
    """Measure one recorded step."""
    tokens, rewards = torch.from_numpy(_count(rows)), torch.tensor(rows.reward, dtype=torch.float64)
    known = (~torch.isnan(rewards)).nonzero().flatten().tolist()
    groups: dict[str, list[int]] = {}
    for row in known:
        groups.setdefault(str(rows.uid[row]), []).append(row)
    found = summarize_lengths(tokens, rewards >= round_threshold(correct_at_least), groups)
    lengths = {"all": float(tokens.mean())} | {name: found[f"{name}/mean"] for name in CLASSES}
    return LengthStep(int(rows.step[0]) if len(rows) else 0, lengths, float(rewards[known].mean()))


def _count(rows: Rows) -> Array:
    """Count the response tokens of each row."""
    return np.bincount(rows.row_of_token, rows.response_mask, minlength=len(rows)).astype(np.float64)


def read_ends(directory: Path) -> list[Answers]:
    """Read the first and the last third of the recorded steps, without rows whose reward is unknown."""
    recording = Recording(directory)
    steps = list(recording.steps)
    third = max(len(steps) // 3, 1)
    found = []
    for part in [steps[:third], steps[-third:]] if len(steps) > 1 else [steps]:
        rows = concatenate([each.rows for step in part for each in recording.parts(step)])
        known = ~np.isnan(rows.reward)
        label = f"steps {part[0]} to {part[-1]}"
        found.append(Answers(label, rows.uid[known], _count(rows)[known], rows.reward[known].astype(np.float64)))
    return found


def read_checkpoints(paths: Sequence[Path], tokenizer: Any) -> list[Answers]:
    """Read dumps, one ``Answers`` per run and step, in the order of their first file.

    Raises:
        DumpError, OSError: as ``validation_answers.read_answers``.
    """
    found: dict[tuple[str, int], list[tuple[str, str, float]]] = {}
    for path in drop_repeated(paths):
        for answer in read_answers(path):
            found.setdefault((find_run(path), answer.step), []).append((answer.prompt, answer.output, answer.score))
    runs = name_runs(run for run, _ in found)
    checkpoints = []
    for (run, step), answers in found.items():
        prompts, outputs, scores = zip(*answers, strict=True)
        tokens = np.array(validation_answers.count_tokens(tokenizer, outputs), dtype=np.float64)
        label = f"{runs[run]}step {step}"
        checkpoints.append(Answers(label, np.array(prompts, dtype=object), tokens, np.array(scores, dtype=np.float64)))
    return checkpoints


def assign(early: Answers, *, samples: int, correct_at_least: float) -> dict[str, set[str]]:
    """Collect the easy and the hard prompts of an early checkpoint; see ``validation_answers.fix_classes``.

    Raises:
        AnalysisError: no prompt has enough answers, or none is easy or hard.
    """
    right = (early.rewards >= round_threshold(correct_at_least)).tolist()
    answers = map(validation_answers.Answer, early.prompts, early.tokens.astype(int).tolist(), right)
    classes = validation_answers.fix_classes(list(answers), samples=samples)
    found = {name: {prompt for prompt, each in classes.items() if each == name} for name in validation_answers.CLASSES}
    if not any(found.values()):
        raise AnalysisError(
            f"{early.label}: {len(classes)} prompts have {samples} answers, but none of these prompts is easy (more "
            "than 90 % correct) or hard (less than 10 %). Name a dump with more samples, or pass --samples."
        )
    return {name: prompts for name, prompts in found.items() if prompts}


def find_edges(of: Sequence[Answers]) -> Array:
    """Find the ends of bins that contain equal shares of the answers, as far as whole lengths allow."""
    tokens = np.concatenate([each.tokens for each in of])
    return np.unique(np.quantile(tokens, np.linspace(0, 1, BINS + 1))) if len(tokens) else np.zeros(0)


def bin_rewards(of: Answers, edges: Array) -> Curve:
    """Compute the reward in each length bin; its interval treats the answers to one prompt as dependent."""
    count = max(len(edges) - 1, 1) if len(edges) else 0
    place = np.clip(np.searchsorted(edges, of.tokens, side="right") - 1, 0, max(count - 1, 0))
    curve = Curve(*(np.full(count, math.nan) for _ in Curve._fields))
    _, number = np.unique(of.prompts.astype(str), return_inverse=True)
    for at in range(count):
        there = place == at
        size = int(there.sum())
        curve.share[at] = size / max(len(of.tokens), 1)
        if size < LEAST:
            continue
        mean = of.rewards[there].mean()
        apart = np.bincount(number[there], of.rewards[there] - mean)
        error = 1.96 * math.sqrt(float(np.square(apart).sum())) / size
        curve.tokens[at], curve.reward[at] = of.tokens[there].mean(), mean
        curve.low[at], curve.high[at] = mean - error, mean + error
    return curve


def find_best(curve: Curve) -> float:
    """Return the mean length of the bin with the highest reward; NaN if no bin has a reward or rewards do not vary."""
    known = curve.reward[~np.isnan(curve.reward)]
    return float(curve.tokens[np.nanargmax(curve.reward)]) if len(known) and np.ptp(known) > 0 else math.nan


def build_class_rows(
    checkpoints: Sequence[Answers], classes: Mapping[str, set[str]], correct_at_least: float
) -> list[dict[str, Any]]:
    """Compute pass rate and length of each class at each checkpoint; each prompt counts equally."""
    found = []
    for name, prompts in classes.items():
        chosen = [each.of(prompts) for each in checkpoints]
        edges = find_edges(chosen)
        for each in chosen:
            right = (each.rewards >= round_threshold(correct_at_least)).astype(np.float64)
            values: dict[str, Any] = {"checkpoint": each.label, "class": name, "prompts": len(set(each.prompts))}
            values["pass_rate"], values["tokens"] = (_by_prompt(each, value) for value in (right, each.tokens))
            values["median_tokens"] = float(np.median(each.tokens)) if len(each.tokens) else math.nan
            values["best_tokens"] = find_best(bin_rewards(each, edges))
            found.append({key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()})
    return found


def _by_prompt(of: Answers, values: Array) -> float:
    if not len(values):
        return math.nan
    _, number, size = np.unique(of.prompts.astype(str), return_inverse=True, return_counts=True)
    return float((np.bincount(number, values) / size).mean())


def build_class_table(rows: Sequence[Mapping[str, Any]], early: str) -> Table:
    """Build the table of ``build_class_rows``."""
    columns = [
        *(Column(name) for name in ("checkpoint", "class", "prompts", "pass rate")),
        *(Column(name, "tokens", digits=1) for name in ("mean", "median", "best reward at")),
    ]
    return Table(columns, [list(row.values()) for row in rows], f"Classes fixed at {early}")


def build_table(curves: Sequence[LengthStep], title: str = "", most: int = 20) -> Table:
    """Build a table of at most ``most`` evenly spread steps, including the first and the last."""
    chosen = sorted(set(np.linspace(0, len(curves) - 1, min(most, len(curves))).round().astype(int).tolist()))
    rows = [[s.step, *(s.lengths[name] for name in NAMES), s.reward] for s in (curves[at] for at in chosen)]
    columns = [Column("step"), *(Column(name, "tokens", digits=1) for name in NAMES), Column("reward")]
    return Table(columns, rows, title)


def plot_classes(checkpoints: Sequence[Answers], classes: Mapping[str, set[str]]) -> list[Panel]:
    """Plot reward and share of answers over length for each class, with one line per checkpoint."""
    return [
        panel
        for name, prompts in classes.items()
        for panel in build_panels([each.of(prompts) for each in checkpoints], f"{name} prompts")
    ]


def build_panels(of: Sequence[Answers], title: str) -> list[Panel]:
    """Build the panels of reward over length, and of the share of answers over length; none without answers."""
    if not of:
        return []
    edges = find_edges(of)
    curves = [(each.label, bin_rewards(each, edges), PALETTE[at % len(PALETTE)]) for at, each in enumerate(of)]
    rewards = [Mark(c.tokens, c.reward, label, colour, band=(c.low, c.high), marker="o") for label, c, colour in curves]
    shares = [Mark(c.tokens, c.share, label, colour, marker="o") for label, c, colour in curves]
    x = Axis("response tokens")
    if all(np.isnan(c.reward).all() for _, c, _ in curves):
        note = f"fewer than {LEAST} answers of any length"
        return [Panel(title, "Mean reward by length", x, Axis(), note=note) for _ in range(2)]
    return [
        Panel(title, "Mean reward by length, with 95 % intervals", x, Axis("mean reward"), rewards),
        Panel(title, "Share of answers by length", x, Axis("share of answers", limits=(0.0, 1.0)), shares),
    ]


def plot_curves(curves: Mapping[str, Sequence[LengthStep]], ends: Mapping[str, Sequence[Answers]] = {}) -> list[Panel]:
    """Plot length by correctness over steps, with the reward next to it and one row of panels per run.

    For runs with ``ends`` (the answers of the first and the last steps), another row of panels shows reward and share
    of answers over length.
    """
    panels, x = [], Axis("step")
    for run, steps in curves.items():
        places = [each.step for each in steps]
        columns = {TITLES[name]: [each.lengths[name] for each in steps] for name in NAMES}
        known = [(label, values) for label, values in columns.items() if not all(map(math.isnan, values))]
        most = max((value for _, values in known for value in values if not math.isnan(value)), default=1.0)
        lines = [Mark(places, values, label, PALETTE[at % len(PALETTE)]) for at, (label, values) in enumerate(known)]
        y = Axis("mean response tokens", limits=(0.0, 1.05 * most or 1.0))
        reward = [Mark(places, [each.reward for each in steps])]
        panels += [
            Panel(run, "Mean length by correctness over steps", x, y, lines),
            Panel("Reward", "Mean reward over steps", x, Axis("mean reward of an answer"), reward),
            *build_panels(ends.get(run, ()), run),
        ]
    return panels
