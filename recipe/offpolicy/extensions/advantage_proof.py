"""Proves, by one hash per row, that the workers' loss uses the advantages that an extension produced."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..batch.seals import hash_rows
from ..proof.verify import LivenessError
from .add_on import Advantages, Extension, WorkerExtension
from .batch_view import BatchView, LossRows

logger = logging.getLogger("verl.offpolicy")


@dataclass(frozen=True)
class AdvantageReport:
    """Hashes of the rows of one micro-batch that have at least one token.

    Attributes:
        hashes: one per row; None if a column is missing.
        missing: columns that did not reach the loss.
    """

    hashes: tuple[int, ...] | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdvantageWorker(WorkerExtension):
    """The worker part of an extension that shapes advantages; it reports hashes of the values that reached the loss."""

    def report(self, rows: LossRows) -> AdvantageReport:
        missing = tuple(name for name in ("advantages", *self.columns) if name not in rows)
        if missing:
            return AdvantageReport(None, missing)
        mask = rows.response_mask
        hashes = hash_rows(rows.column("responses"), mask, rows.column("advantages"))
        return AdvantageReport(tuple(hashes[mask.any(-1)].tolist()))


class AdvantageExtension(Extension):
    """An extension that shapes advantages, and checks that the loss receives the advantages that its hooks returned.

    ``estimate`` or ``shape_advantages`` stores in ``_demanded`` a description of one advantage that the extension must
    change in this batch.
    """

    title: ClassVar[str] = ""
    """The extension's name in the log."""
    prefix: ClassVar[str] = ""
    """Prefix of the names of the extension's metrics."""
    differs: ClassVar[bool] = True
    """Whether the advantage in ``_demanded`` must differ from verl's own; if so, the run stops if no row was
    changed."""

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self._sent: dict[str, int] = {}
        self._changed = 0
        self._demanded = ""
        self._proved = False
        self._found: dict[str, float] = {}

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        self._sent = hash_advantages(batch, advantages.final)
        self._changed = int((advantages.final != advantages.own).any(-1).sum())

    def judge(self, reports: Sequence[Any]) -> Mapping[str, float]:
        if self._demanded and self.differs and self._changed == 0:
            raise LivenessError(
                f"{self.section}: no sequence's advantages were changed, but some must change ({self._demanded})."
            )
        if self._demanded and not self._proved:
            self._proved = True
            logger.info("%s LIVE on %d sequences: %s", self.title, self._changed, self.meaning)
        return {
            f"{self.prefix}/live/changed_rows": float(self._changed),
            f"{self.prefix}/live/proved": float(self._proved),
        }

    def worker(self) -> AdvantageWorker | None:
        return AdvantageWorker()

    def metrics(self) -> Mapping[str, float]:
        return self._found

    @property
    def sent(self) -> Mapping[str, int]:
        return self._sent

    def silence(self, batch: BatchView, rows: Tensor) -> None:
        zeros = hash_advantages(batch, torch.zeros_like(batch.rows("advantages")["advantages"]))
        self._sent |= {
            key: zeros[key] for key, silent in zip(batch.keys, rows.tolist(), strict=True) if silent and key in zeros
        }


def hash_advantages(batch: BatchView, advantages: Tensor) -> dict[str, int]:
    """Hash each row that has a token, together with its advantages for the workers; return the hashes by key."""
    columns = batch.rows("responses", "response_mask")
    return name_hashes(batch, columns["responses"], columns["response_mask"].bool(), advantages)


def name_hashes(batch: BatchView, responses: Tensor, mask: Tensor, values: Tensor) -> dict[str, int]:
    """Hash each row in which the mask selects at least one token; return the hashes by key."""
    hashes = hash_rows(responses, mask, values).tolist()
    there = mask.any(-1).tolist()
    return {key: number for key, number, is_there in zip(batch.keys, hashes, there, strict=True) if is_there}
