"""The parts of a V1 trainer's run that add-ons read or call outside their hooks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from omegaconf import DictConfig
from torch import Tensor

from ..batch.plan import BatchSplit
from ..monitor.step_cost import StepCost
from ..recording.run import RunRecord
from .batch_view import BatchView


class V1Run(Protocol):
    """Interface of a V1 trainer's run.

    Attributes:
        trainer: verl's trainer.
        verls: the trainer's own methods, bound, by name.
        supervision: supervision of the updates; see ``trainer.supervision``.
    """

    trainer: Any
    verls: Any
    supervision: Any
    recording: RunRecord

    @property
    def config(self) -> DictConfig: ...

    @property
    def global_steps(self) -> int: ...

    @property
    def workers(self) -> Any:
        """The worker group of the actor."""

    @property
    def cost(self) -> StepCost: ...

    def view(self, batch: Any) -> BatchView: ...

    def seal(self, batch: Any, columns: Mapping[str, Tensor]) -> None:
        """Seal the current columns of all rows, so that the loss stops the run if the values it reads differ."""

    def split_batch(self) -> BatchSplit: ...

    def take_out(self, batch: Any, why: str, *, masked: Collection[str], silenced: Collection[str]) -> Any:
        """Tell extensions which rows leave the update, see ``AddOns.take_out``; return the batch to continue with."""
