"""Metrics of a run as verl's file logger wrote them, and reports on them: lines, a verdict, a table and a figure."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from recipe.offpolicy.analysis.plotting import FigurePanel, add_legend, draw_panels, save
from recipe.offpolicy.analysis.table import Column, Table, format_cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD = "critic/rewards/mean|critic/score/mean"
"""If a key has alternatives, the first alternative that is present is used."""
KL, KEPT = "offpolicy/kl/k3", "offpolicy/keep/token_share"
ESS, RATIO_ESS = "offpolicy/weight/ess", "offpolicy/rollout_ratio/ess"
PROVED, SECONDS = "offpolicy/live/proved", "timing_s/step"
FIRST_VALUE = "process_reward/value/first/mean"

OK, FAILED, REFUSED, NOT_RISEN, NOT_LIVE = range(5)
"""Exit codes of scripts/quickstart.sh; if a run is interrupted, the code is 128 + the number of the signal."""
REQUIRED_RISE = 0.1
HEARTBEAT = 15.0
"""Seconds between heartbeat lines when the output is not a terminal."""
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
"""Rows of the summary that are shown only if one of them has a value."""


def pick(data: dict[str, Any], key: str) -> float:
    """Return the value of a key; NaN if the key is missing."""
    return next((float(data[each]) for each in key.split("|") if data.get(each) is not None), math.nan)


def read_validation(data: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the share of exact matches and verl's own score; None for a value that was not measured at the step.

    The spelling task grades answers: correct letters earn credit, so the score is higher than the share of exact
    matches. The keys end in `mean@N`, for N answers to each question.
    """
    exact, score = (
        next((float(value) for key, value in data.items() if re.fullmatch(pattern, key)), None)
        for pattern in (r"val-aux/.+/exact/mean@\d+", r"val-core/.+/mean@\d+")
    )
    return exact, score


@dataclass
class History:
    """(step, metrics), in the order in which they were written."""

    records: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def add(self, lines: Iterable[str]) -> list[tuple[int, dict[str, Any]]]:
        """Append lines of the file logger, and return the records in them."""
        new = [(line["step"], line["data"]) for line in map(json.loads, lines)]
        self.records += new
        return new

    @property
    def steps(self) -> list[int]:
        """Steps at which the policy was updated."""
        return [step for step, data in self.records if not math.isnan(pick(data, REWARD))]

    def series(self, key: str) -> list[float]:
        """Return one value for each of `steps`, with NaN where it was not logged."""
        return [pick(data, key) for _, data in self.records if not math.isnan(pick(data, REWARD))]

    @property
    def heldout(self) -> dict[str, list[tuple[int, float]]]:
        """(step, value) of each validation, by measure; exact match comes first, followed by a graded score, if any."""
        measured = [(step, *read_validation(data)) for step, data in self.records]
        exact = [(step, share) for step, share, _ in measured if share is not None]
        scores = [(step, score) for step, _, score in measured if score is not None]
        return {"exact match": exact, "graded score": scores} if exact else {"score": scores}

    @property
    def ess(self) -> str:
        """Key of the effective sample size: that of the weights, or that of the ratio if all weights are 1."""
        weights = [value for value in self.series(ESS) if not math.isnan(value)]
        return RATIO_ESS if all(value == 1.0 for value in weights) else ESS

    @property
    def proved(self) -> bool:
        """True if it was proved that the worker's gradient contains the correction."""
        return any(data.get(PROVED) == 1.0 for _, data in self.records)


def judge(history: History, *, corrected: bool, judged: bool, scored: bool = True) -> tuple[int, str]:
    """Judge a run that ended on its own; return its exit code and a sentence.

    Args:
        corrected: whether a correction is configured, so that its liveness proof must exist.
        judged: whether the score must have risen by REQUIRED_RISE; False for fewer steps, or for another model or task.
        scored: whether the held-out score was requested, before and after training.
    """
    *_, (judged_by, scores) = history.heldout.items()
    if not history.steps:
        return FAILED, "training ended without a step"
    if scored and len(scores) < 2:
        return FAILED, "training ended without the held-out score before and after it"
    if corrected and not history.proved:
        return NOT_LIVE, "the correction was not proved live: offpolicy/live/proved is not 1"
    if not scored:
        return OK, f"trained {len(history.steps)} steps (not judged: validation is switched off)"
    changes = [f"{name} from {each[0][1]:.3f} to {each[-1][1]:.3f}" for name, each in history.heldout.items()]
    change = f"held out, {' and '.join(changes)}"
    if not judged:
        return OK, f"{change} (not judged: fewer steps than the default, or another model or task)"
    if scores[-1][1] - scores[0][1] < REQUIRED_RISE:
        return NOT_RISEN, f"{change}: the {judged_by} must rise by {REQUIRED_RISE}"
    return OK, change


class Progress:
    """Prints lines with the time; between lines, it shows a spinner on a terminal, and a heartbeat in a log."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(highlight=False)
        self._clock = clock
        self._start = self._last_line = self._stage_start = clock()
        self._stage = ""
        self._status = self.console.status("")

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def line(self, text: str, style: str = "") -> None:
        """Print a line that is not overwritten."""
        self._last_line = self._clock()
        elapsed = self._last_line - self._start
        self.console.print(f"[{elapsed:4.0f} s] {text}", style=style or None, markup=False, soft_wrap=True)

    def stage(self, name: str, detail: str = "") -> None:
        """Begin a stage; if the stage has the same name as the current one, nothing changes."""
        if name != self._stage:
            self._stage, self._stage_start = name, self._clock()
            self.line(f"{name}{f' ({detail})' if detail else ''}", style="bold")

    def tick(self) -> None:
        """Show the time spent in this stage; call this several times a second."""
        waited = f"{self._stage}, {self._clock() - self._stage_start:.0f} s"
        if self.console.is_terminal:
            self._status.update(waited)
        elif self._clock() - self._last_line > HEARTBEAT:
            self.line(f"... {waited}")


class TrainingView:
    """Converts verl's log to stages and lines.

    Args:
        steps: number of training steps; 0 if unknown.
        corrected: whether a liveness proof must be reported.
        scored: whether the held-out score is requested, before and after training.
    """

    def __init__(self, progress: Progress, history: History, steps: int, corrected: bool, scored: bool) -> None:
        self._progress, self._history = progress, history
        self._steps, self._corrected, self._scored = steps, corrected, scored
        progress.stage("starting Ray and vLLM", "about a minute on two cores")

    def log_line(self, text: str) -> None:
        """Show the progress that a line of the training's log indicates."""
        if "Creating file logger at" in text:
            self._progress.stage("held-out questions before training" if self._scored else "first step")

    def step(self, step: int, data: dict[str, Any]) -> None:
        """Show the metrics of a step; step 0 is the validation before training."""
        (exact, score), steps = read_validation(data), self._steps
        if step > 0:
            parts = [("reward", REWARD), ("KL", KL), ("ESS", self._history.ess), ("kept", KEPT)]
            values = ", ".join(f"{name} {format_cell(pick(data, key))}" for name, key in parts)
            of = f" of {steps}" if steps else ""
            self._progress.line(f"  step {step}{of}: {values}, {format_cell(pick(data, SECONDS), 1)} s")
            if self._corrected and self._history.steps[:1] == [step] and data.get(PROVED) == 1.0:
                self._progress.line("  the correction is proved live: it reached the gradient of the first update")
        if score is not None:
            when = f"after step {step}" if step else "before training"
            shown = f"score {score:.3f}" if exact is None else f"exact match {exact:.3f}, graded score {score:.3f}"
            self._progress.line(f"  held out {when}: {shown}")
        if not steps or step + 1 < steps:
            self._progress.stage("training", f"{steps} steps" if steps else "as many steps as the epochs have")
        elif step + 1 == steps:
            self._progress.stage("last step, then the held-out questions" if self._scored else "last step")
        else:
            self._progress.stage("ending")


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
    """Build the table of the first and the last values."""
    named = {f"held-out {name}": [value for _, value in each] for name, each in history.heldout.items()}
    keys = {_name_reward(history): REWARD, "mismatch KL (k3)": KL, _name_ess(history): history.ess}
    keys |= {"kept share": KEPT, "seconds a step": SECONDS}
    named |= {name: history.series(key) for name, key in keys.items()}
    for optional in OPTIONAL:
        series = {name: history.series(key) for name, key in optional.items()}
        if not np.isnan([*series.values()]).all():
            named |= series
    known = {name: [value for value in each if not math.isnan(value)] or [math.nan] for name, each in named.items()}
    rows: list[list[Any]] = [[name, values[0], values[-1]] for name, values in known.items()]
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
        # NaN is ignored.
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

        return FigurePanel(draw_all)

    save(draw_panels([panel(lines) for lines in (reward, mismatch, kept)], columns=3, title=title), path, dpi=150)
