"""Proof that the advantages in the workers' loss are those that an extension left: a hash of each row, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..batch.checksums import hash_rows
from ..batch.row_arrival import match_rows
from ..proof.verify import LivenessError
from .batch_view import BatchView
from .extension import WorkerExtension
from .loss_rows import LossRows


@dataclass(frozen=True)
class AdvantageReport:
    """Hashes of one micro-batch's rows with a token; None: its loss had no advantages."""

    hashes: tuple[int, ...] | None


@dataclass(frozen=True)
class AdvantageWorker(WorkerExtension):
    """The half in the workers of an extension that shapes advantages: it reports what the loss came with."""

    def report(self, rows: LossRows) -> AdvantageReport:
        if "advantages" not in rows:
            return AdvantageReport(None)
        mask = rows.response_mask
        hashes = hash_rows(rows.column("responses"), mask, rows.column("advantages"))
        return AdvantageReport(tuple(hashes[mask.any(-1)].tolist()))


def hash_advantages(batch: BatchView, advantages: Tensor) -> tuple[int, ...]:
    """Hash the rows of a batch that have a token, with the advantages that the workers are to see."""
    columns = batch.rows("responses", "response_mask")
    mask = columns["response_mask"].bool()
    return tuple(hash_rows(columns["responses"], mask, advantages)[mask.any(-1)].tolist())


def check_arrival(section: str, shipped: Sequence[int], reports: Sequence[AdvantageReport]) -> None:
    """Check that the workers' loss saw the rows that were shipped; several epochs see each as many times.

    Raises:
        LivenessError: rows are missing, or have other advantages.
    """
    if any(report.hashes is None for report in reports):
        raise LivenessError(f"{section}: no advantages reached the loss of a micro-batch.")
    rows = match_rows(shipped, (number for report in reports for number in report.hashes or ()))
    if not rows.whole:
        raise LivenessError(
            f"{section}: advantages of {rows.sent} rows were shaped, and the loss saw {rows.seen} rows, "
            f"{rows.known} of them with these. Something estimates, changes or mixes up advantages on their way."
        )
