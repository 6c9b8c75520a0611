"""Progress on a terminal or in a log, without a silent half minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from recipe.offpolicy.analysis.pages.table import format_cell

from .metrics import KEPT, KL, PROVED, REWARD, SECONDS, History, pick, read_exact_share, read_heldout_score

HEARTBEAT = 15.0
"""Seconds after which a log that is not a terminal gets a sign of life."""


class Progress:
    """Printer of timed lines; between them a terminal shows a spinner, a log a heartbeat."""

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
        """Print a line that stays."""
        self._last_line = self._clock()
        elapsed = self._last_line - self._start
        self.console.print(f"[{elapsed:4.0f} s] {text}", style=style or None, markup=False, soft_wrap=True)

    def stage(self, name: str, detail: str = "") -> None:
        """Begin a stage; repeating the same name changes nothing."""
        if name != self._stage:
            self._stage, self._stage_start = name, self._clock()
            self.line(f"{name}{f' ({detail})' if detail else ''}", style="bold")

    def tick(self) -> None:
        """Show the time in this stage; to be called several times a second."""
        waited = f"{self._stage}, {self._clock() - self._stage_start:.0f} s"
        if self.console.is_terminal:
            self._status.update(waited)
        elif self._clock() - self._last_line > HEARTBEAT:
            self.line(f"... {waited}")


class TrainingView:
    """Converter of verl's log into stages and lines.

    Args:
        steps: length of the training, 0 if unknown.
        corrected: a proof of life is to be told.
        scored: the held-out score is asked for, before training and after it.
    """

    def __init__(self, progress: Progress, history: History, steps: int, corrected: bool, scored: bool) -> None:
        self._progress, self._history = progress, history
        self._steps, self._corrected, self._scored = steps, corrected, scored
        progress.stage("starting Ray and vLLM", "about a minute on two cores")

    def log_line(self, text: str) -> None:
        """Show progress from a line of the training's log."""
        if "Creating file logger at" in text:
            self._progress.stage("held-out questions before training" if self._scored else "first step")

    def step(self, step: int, data: dict[str, Any]) -> None:
        """Show the metrics of a step, the 0th of which is the validation before training."""
        score, steps = read_heldout_score(data), self._steps
        if step > 0:
            parts = [("reward", REWARD), ("KL", KL), ("ESS", self._history.ess), ("kept", KEPT)]
            values = ", ".join(f"{name} {format_cell(pick(data, key))}" for name, key in parts)
            of = f" of {steps}" if steps else ""
            self._progress.line(f"  step {step}{of}: {values}, {format_cell(pick(data, SECONDS), 1)} s")
            if self._corrected and self._history.steps[:1] == [step] and data.get(PROVED) == 1.0:
                self._progress.line("  the correction is proved live: it reached the gradient of the first update")
        if score is not None:
            when = f"after step {step}" if step else "before training"
            exact = read_exact_share(data)
            shown = f"score {score:.3f}" if exact is None else f"exact match {exact:.3f}, graded score {score:.3f}"
            self._progress.line(f"  held out {when}: {shown}")
        if not steps or step + 1 < steps:
            self._progress.stage("training", f"{steps} steps" if steps else "as many steps as the epochs have")
        elif step + 1 == steps:
            self._progress.stage("last step, then the held-out questions" if self._scored else "last step")
        else:
            self._progress.stage("ending")
