"""Common part of the views of a batch for add-ons, see ``extensions.batch_view.BatchView``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..correction import RolloutStage, Statistic
from .own_forward import Pair


class HeldBatch:
    """One batch that verl's trainer holds.

    Args:
        batch: verl's batch.
        step: the trainer's step.
        sent: called with the columns that go to the workers, for all rows.
        forward: computes log-probs of (prompt, response) pairs by the trainer's own forward pass, outside the batch.
        decide: runs the rollout stage of the correction in force on the batch.
    """

    def __init__(
        self,
        batch: Any,
        step: int,
        sent: Callable[[Mapping[str, Tensor]], None] = lambda columns: None,
        forward: Callable[[Any, Sequence[Pair]], list[list[float]]] | None = None,
        decide: Callable[[Any], RolloutStage] | None = None,
    ):
        self.batch, self.step = batch, step
        self.silent: Tensor | None = None
        self._sent, self._forward, self._decide = sent, forward, decide
        self._groups: list[str] | None = None
        self._stage: RolloutStage | None = None

    def compute_log_probs(self, rows: Sequence[Pair]) -> list[list[float]]:
        assert self._forward is not None, "this view was built without a trainer's forward pass"
        return self._forward(self.batch, rows)

    def weigh(self) -> tuple[Tensor, Mapping[str, Statistic]]:
        assert self._decide is not None, "this view was built without a correction"
        if self._stage is None:
            self._stage = self._decide(self.batch)
        return self._of_real(self._stage.weight * self._stage.keep), self._stage.statistics

    def rows(self, *names: str) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def advantages(self) -> Tensor:
        advantages: Tensor = self.rows("advantages")["advantages"]
        return advantages

    def _of_real(self, column: Any) -> Any:
        """Reduce a column to the rows that are no padding."""
        return column
