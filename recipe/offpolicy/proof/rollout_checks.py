"""The rollout's log-probs at every update: that they arrive, and that they are those of the tokens they came with.

Cheap next to a step: one checksum a row and a few comparisons of signs. ``liveness`` proves the first update; this
goes on looking.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

from tensordict import TensorDict
from torch import Tensor

from ..batch.micro_batch import ROLLOUT_LOG_PROBS, row_checksums
from .rollout_log_probs import check_arrived, check_zeros, missing
from .token_alignment import KINDS, AlignmentWatch, Tally, tally

SAMPLED = ("responses", "response_mask", ROLLOUT_LOG_PROBS)
"""What ``sampled`` reads of a rollout."""
ALIGNED = ("response_mask", ROLLOUT_LOG_PROBS, "old_log_probs")
"""What ``aligned`` reads once the trainer's own log-probs are there."""
_NAMES = tuple(f"concordance_{kind}" for kind in KINDS)


_NOT_READY = "fields are not ready"
"""What TransferQueue says where some of the rows lack a column; one that all lack it leaves out."""


class SampleWatch:
    """Looks at each batch of one run, in the process of the trainer.

    Args:
        allow_unrelated: log-probs that have nothing to do with the trainer's are meant.
    """

    def __init__(self, *, allow_unrelated: bool = False) -> None:
        self._alignment = AlignmentWatch(allow_unrelated)
        self._metrics: dict[str, float] = {}

    def sampled(self, rows: TensorDict) -> list[int]:
        """The checksums of a rollout as it came, see ``micro_batch.row_checksums``.

        Args:
            rows: with ``SAMPLED``, (B, T) each, nested or padded.

        Raises:
            ArrivalError: mu is missing or is no log-probs.
        """
        responses, mask, mu = _dense(rows, SAMPLED)
        check_arrived(mu, mask)
        return row_checksums(responses, mask, mu)

    def aligned(self, rows: TensorDict, groups: Sequence[str] | None = None) -> None:
        """Hold mu against the log-probs that the trainer computed.

        Args:
            rows: with ``ALIGNED``, (B, T) each, nested or padded.
            groups: of each row, its prompt.

        Raises:
            ArrivalError: zeros stand in for mu.
            AlignmentError: mu is off by one token or that of other rows.
        """
        mask, mu, log_prob = _dense(rows, ALIGNED)
        check_zeros(mu, log_prob, mask)
        self.judge([tally(log_prob, mu, mask, groups)])

    def judge(self, tallies: Iterable[Tally | None]) -> None:
        """The same from what the workers counted, where pi_old is mu and only the current policy can tell.

        Raises:
            AlignmentError: mu is off by one token or that of other rows.
        """
        self._metrics = self._alignment.judge(sum((one for one in tallies if one is not None), Tally()))

    def metrics(self) -> dict[str, float]:
        """Of the last update: ``alignment/...``."""
        return {f"alignment/{name}": self._metrics.get(name, math.nan) for name in _NAMES}


@contextlib.contextmanager
def naming_missing() -> Iterator[None]:
    """Around the fetch of ``SAMPLED`` from TransferQueue, whose own error names no column.

    Raises:
        ArrivalError: some rows have no mu; the rest of ``SAMPLED`` each rollout has.
    """
    try:
        yield
    except ValueError as error:
        if _NOT_READY in str(error) or ROLLOUT_LOG_PROBS in str(error):
            raise missing(f"rows without them ({error})") from error
        raise


def _dense(rows: TensorDict, names: Sequence[str]) -> list[Tensor]:
    if ROLLOUT_LOG_PROBS not in rows.keys():
        raise missing(", ".join(sorted(map(str, rows.keys()))))
    dense = rows.select(*names).to_padded_tensor()
    return [dense[name] for name in names]
