"""The learning rate of one optimizer step in verl's FSDP engine: multiplied before the step, read in it, then restored.

Patched functions in verl 0.9.1, see ``verl_patches.optimizer_steps``: ``train_batch(self, data, loss_function)`` and
``optimizer_step(self)`` of the engine's instance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.utils import tensordict_utils as tu

REPORT = "offpolicy_lr_report"
"""Key of the ``LrReport`` in the metrics of an update."""
FLAG = "offpolicy_lr_factor"
"""Key of the factor in a batch."""


@dataclass(frozen=True)
class LrReport:
    """The learning rates of one optimizer step on one rank, one per group of parameters.

    Attributes:
        factor: as it arrived; None: it did not.
        planned: the scheduler's.
        read: the optimizer's own, read after its step; None: it did not step.
        stepped: whether the gradient was finite; verl steps only then.
    """

    factor: float | None
    planned: tuple[float, ...]
    read: tuple[float, ...] | None
    stepped: bool


class ScaledSteps:
    """Scaling around one engine; outside a step, optimizer and scheduler are as verl left them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._train, self._step = engine.train_batch, engine.optimizer_step
        self._factor: float | None = None
        self._read: tuple[float, ...] | None = None
        self._report: LrReport | None = None
        engine.train_batch, engine.optimizer_step = self.train_batch, self.optimizer_step
        engine.optimizer.register_step_post_hook(self._note)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """Run verl's method; its metrics get a report."""
        self._factor, self._report = tu.get_non_tensor_data(data, FLAG, default=None), None
        output = self._train(data, loss_function)
        output["metrics"][REPORT] = [self._report]
        return output

    def optimizer_step(self) -> Any:
        """Run verl's method at the scheduler's rate times the factor."""
        planned = tuple(map(float, self.engine.lr_scheduler.get_last_lr()))
        groups, self._read = self.engine.optimizer.param_groups, None
        before = [group["lr"] for group in groups]
        for group, rate in zip(groups, planned, strict=True):
            group["lr"] = rate if self._factor is None else rate * self._factor
        try:
            norm = self._step()
        finally:
            # The next step starts from the scheduler's rate, and so does a checkpoint.
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate
        self._report = LrReport(self._factor, planned, self._read, math.isfinite(norm))
        return norm

    def _note(self, optimizer: Any, *of_step: Any) -> None:
        self._read = tuple(float(group["lr"]) for group in optimizer.param_groups)


def scale_steps(worker: Any) -> None:
    """Make the engine of verl's actor worker scale its learning rate by the factor of each batch."""
    ScaledSteps(worker.actor.engine)
