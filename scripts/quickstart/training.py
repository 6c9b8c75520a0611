"""Follows a training run through its log and its metrics file, and says what is going on."""

from __future__ import annotations

from typing import Any

from metrics import ESS, KEPT, KL, PROVED, REWARD, SECONDS, History, MetricsFile, heldout_score, pick
from progress import Progress
from report import number

STARTING = "starting Ray and vLLM"
MILESTONES = {
    "Started a local Ray instance": "Ray is up, its workers import verl",
    "create worker group": "starting the trainer's worker",
    "actor and ref model engine initialized": "the trainer's worker is ready, starting vLLM",
    "checkpoint engine manager initialized": "vLLM is ready, starting the rollout's workers",
}
"""What verl writes on its way to the first step -> what it means."""


class TrainingView:
    """Turns what verl writes into stages and lines.

    Args:
        steps: length of the training, 0 if unknown.
        corrected: a proof of life is to be told.
        scored: the held-out score is asked for, before training and after it.
    """

    def __init__(
        self,
        progress: Progress,
        metrics: MetricsFile,
        history: History,
        steps: int,
        corrected: bool,
        scored: bool = True,
    ) -> None:
        self._progress = progress
        self._metrics = metrics
        self._history = history
        self._steps = steps
        self._corrected = corrected
        self._scored = scored
        self._of = f" of {steps}" if steps else ""
        self._milestones = dict(MILESTONES)
        progress.stage(STARTING, "about a minute on two cores")

    def on_line(self, text: str) -> None:
        """A line of the training's log."""
        for sign in [sign for sign in self._milestones if sign in text]:
            self._progress.line(f"  {self._milestones.pop(sign)}")
        if "Creating file logger at" in text:
            self._progress.stage("held-out score before training" if self._scored else "first step")

    def on_tick(self) -> bool:
        """True when new metrics have arrived."""
        records = self._metrics.read_new()
        for step, data in records:
            self._history.records.append((step, data))
            self._show(step, data)
        self._progress.tick()
        return bool(records)

    def _show(self, step: int, data: dict[str, Any]) -> None:
        score = heldout_score(data)
        if step == 0:
            if score is not None:
                self._progress.line(f"  held-out score before training: {score:.3f}")
        else:
            parts = [("reward", REWARD), ("KL", KL), ("ESS", ESS), ("kept", KEPT)]
            values = ", ".join(f"{name} {number(pick(data, keys))}" for name, keys in parts)
            self._progress.line(f"  step {step}{self._of}: {values}, {number(pick(data, SECONDS), 1)} s")
            if self._corrected and self._history.steps[:1] == [step] and data.get(PROVED) == 1.0:
                self._progress.line("  the correction is proved live: it reached the gradient of the first update")
            if score is not None:
                self._progress.line(f"  held-out score after step {step}: {score:.3f}")
        if not self._steps or step + 1 < self._steps:
            self._progress.stage(
                "training", f"{self._steps} steps" if self._steps else "as many steps as the epochs have"
            )
        elif step + 1 == self._steps:
            self._progress.stage("last step, then the held-out score after training" if self._scored else "last step")
        else:
            self._progress.stage("ending")
