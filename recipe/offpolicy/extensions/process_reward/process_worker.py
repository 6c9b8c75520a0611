"""The half of process rewards in the workers: evidence that the advantages there are those of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..advantage_proof import AdvantageWorker
from .columns import UTILITY


@dataclass(frozen=True)
class ProcessWorker(AdvantageWorker):
    """The half without settings: advantages are shaped in the trainer, and the loss is verl's."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {UTILITY: "what the episode that ends here added to log p(answer), in nats; NaN elsewhere"}
