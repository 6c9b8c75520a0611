"""The half of process rewards in the workers: evidence that the advantages there are those of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...batch.checksums import hash_rows
from ..extension import WorkerExtension
from ..loss_rows import LossRows
from .columns import UTILITY


@dataclass(frozen=True)
class ProcessReport:
    """Evidence from one micro-batch, in plain Python.

    Attributes:
        arrived: the dtype of ``UTILITY``; None: it did not reach the loss.
        hashes: of each row with a response token: ids and bits of its advantages.
    """

    arrived: str | None
    hashes: tuple[int, ...]


@dataclass(frozen=True)
class ProcessWorker(WorkerExtension):
    """The half without settings: advantages are shaped in the trainer, and the loss is verl's."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {UTILITY: "what the episode that ends here added to log p(answer), in nats; NaN elsewhere"}

    def report(self, rows: LossRows) -> ProcessReport:
        mask = rows.response_mask
        hashes = hash_rows(rows.column("responses"), mask, rows.column("advantages").to(torch.float32))
        arrived = str(rows.column(UTILITY).dtype) if UTILITY in rows else None
        return ProcessReport(arrived, tuple(hashes[mask.any(-1)].tolist()))
