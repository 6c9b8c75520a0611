"""Proof that the advantages in the workers' loss are those that an extension produced, by a hash of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch.checksums import hash_rows
from .batch_view import BatchView
from .extension import Advantages, Extension, WorkerExtension
from .loss_rows import LossRows


@dataclass(frozen=True)
class AdvantageReport:
    """Hashes of one micro-batch's rows with a token.

    Attributes:
        hashes: None if a column is missing.
        missing: columns that did not reach the loss.
    """

    hashes: tuple[int, ...] | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdvantageWorker(WorkerExtension):
    """The worker part of an extension that shapes advantages: it reports the values that reached the loss."""

    def report(self, rows: LossRows) -> AdvantageReport:
        missing = tuple(name for name in ("advantages", *self.columns) if name not in rows)
        if missing:
            return AdvantageReport(None, missing)
        mask = rows.response_mask
        hashes = hash_rows(rows.column("responses"), mask, rows.column("advantages"))
        return AdvantageReport(tuple(hashes[mask.any(-1)].tolist()))


class AdvantageExtension(Extension):
    """An extension that shapes advantages, and compares those in the loss with the result of the hooks."""

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self._sent: dict[str, int] = {}

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        self._sent = hash_advantages(batch, advantages.final)

    @property
    def sent(self) -> Mapping[str, int]:
        return self._sent

    def silence(self, batch: BatchView, rows: Tensor) -> None:
        zeros = hash_advantages(batch, torch.zeros_like(batch.rows("advantages")["advantages"]))
        self._sent |= {
            key: zeros[key] for key, silent in zip(batch.keys, rows.tolist(), strict=True) if silent and key in zeros
        }


def hash_advantages(batch: BatchView, advantages: Tensor) -> dict[str, int]:
    """Hash the rows of a batch that have a token, by key, with the advantages for the workers."""
    columns = batch.rows("responses", "response_mask")
    return name_hashes(batch, columns["responses"], columns["response_mask"].bool(), advantages)


def name_hashes(batch: BatchView, responses: Tensor, mask: Tensor, values: Tensor) -> dict[str, int]:
    """Hash the rows of a batch that have a token in the mask, by key."""
    hashes = hash_rows(responses, mask, values).tolist()
    there = mask.any(-1).tolist()
    return {key: number for key, number, is_there in zip(batch.keys, hashes, there, strict=True) if is_there}
