"""Curves of length by correctness and difficulty, read from metrics or a recording, as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...extensions.length_penalty.penalties import CLASSES, summarize_lengths
from ...extensions.sessions import read_lines, round_threshold
from ...recording import Recording, Rows
from ...recording.schema import concatenate
from ..plotting import PALETTE, Axis, Mark, Panel, draw_panels
from ..table import Column, Table
from .by_length import Answers, build_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REWARD = ("critic/score/mean", "critic/rewards/mean")
LENGTH = "response_length/mean"
PREFIX = "length/"
NAMES = ("all", *CLASSES)
TITLES = {
    "all": "all answers",
    "right": "right answers",
    "wrong": "wrong answers",
    "easy": "easy prompts (0.9 or more correct)",
    "hard": "hard prompts (0.1 or less correct)",
}


class CurveError(ValueError):
    """The path contains neither metrics with lengths nor a recording."""


@dataclass(frozen=True)
class LengthStep:
    """Mean length for each of ``NAMES`` at one step (NaN if no answer belongs to the name), and the mean reward."""

    step: int
    lengths: Mapping[str, float]
    reward: float


def read_curves(path: Path, *, correct_at_least: float) -> list[LengthStep]:
    """Read the curves of a file of metrics (verl's logger ``file``), or of a recording's directory.

    Raises:
        CurveError: there are no curves in it.
        RecordingError, OSError: it cannot be read.
    """
    if path.is_dir():
        recording = Recording(path)
        whole = (concatenate([part.rows for part in recording.parts(step)]) for step in recording.steps)
        return [measure_rows(rows, correct_at_least) for rows in whole]
    found: list[LengthStep] = []
    fix = "Name a file of metrics from verl's file logger, or the directory of a recording."
    for number, line in read_lines(path, CurveError, fix):
        try:
            step, data = int(line["step"]), dict(line["data"])
        except (KeyError, TypeError, ValueError) as error:
            raise CurveError(
                f"{path}, line {number}: this is not a line of verl's file logger ({error!r}). {fix}"
            ) from error
        if LENGTH not in data:
            continue
        # verl's logger writes null for NaN.
        known = {key: float(value) for key, value in data.items() if isinstance(value, int | float)}
        lengths = {name: known.get(f"{PREFIX}{name}/mean", math.nan) for name in CLASSES}
        reward = next((known[key] for key in REWARD if key in known), math.nan)
        found.append(LengthStep(step, {"all": known.get(LENGTH, math.nan)} | lengths, reward))
    if not found:
        raise CurveError(f"{path}: no step records {LENGTH}.")
    return found


def measure_rows(rows: Rows, correct_at_least: float) -> LengthStep:
    """Measure one recorded step."""
    tokens = torch.zeros(len(rows), dtype=torch.float64)
    tokens.index_add_(0, torch.from_numpy(rows.row_of_token), torch.from_numpy(rows.response_mask).double())
    known = [row for row, reward in enumerate(rows.reward.tolist()) if not math.isnan(reward)]
    groups: dict[str, list[int]] = {}
    for row in known:
        groups.setdefault(str(rows.uid[row]), []).append(row)
    rewards = torch.tensor(rows.reward, dtype=torch.float64)
    found = summarize_lengths(tokens, rewards >= round_threshold(correct_at_least), groups)
    lengths = {name: found[f"{name}/mean"] for name in CLASSES}
    whole = float(tokens.mean()) if len(rows) else math.nan
    reward = float(rewards[known].mean()) if known else math.nan
    return LengthStep(int(rows.step[0]) if len(rows) else 0, {"all": whole} | lengths, reward)


def build_table(curves: Sequence[LengthStep], title: str = "", most: int = 20) -> Table:
    """Build a table of evenly spread steps, including the first and the last."""
    chosen = sorted({round(at * (len(curves) - 1) / max(min(most, len(curves)) - 1, 1)) for at in range(most)})
    rows = [
        [curves[at].step, *(curves[at].lengths[name] for name in NAMES), curves[at].reward]
        for at in chosen
        if at < len(curves)
    ]
    columns = [Column("step"), *(Column(name, "tokens", digits=1) for name in NAMES), Column("reward")]
    return Table(columns, rows, title)


def draw_curves(curves: Mapping[str, Sequence[LengthStep]], ends: Mapping[str, Sequence[Answers]] = {}) -> Figure:
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
    return draw_panels(panels, columns=2)
