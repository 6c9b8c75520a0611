"""The worker part of process rewards: evidence that the advantages there are those of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..advantage_proof import AdvantageWorker
from .columns import UTILITY


@dataclass(frozen=True)
class ProcessWorker(AdvantageWorker):
    """A worker part without settings: advantages are shaped in the trainer, and the loss is verl's."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {UTILITY: "increase of log p(answer) by the episode that ends here, in nats; NaN elsewhere"}
