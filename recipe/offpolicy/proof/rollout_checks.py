"""Checks of the rollout's log-probs at every update: they are present, finite and belong to their tokens.

The cost is small compared with a step: one checksum per sequence and a few sign comparisons. ``verify`` judges the
first update, these checks judge every update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

from tensordict import TensorDict
from torch import Tensor

from ..batch.micro_batch import ROLLOUT_LOG_PROBS, compute_row_checksums
from .rollout_log_probs import build_missing_error, check_arrived, check_placeholders, check_zeros
from .sampling_distribution import ENOUGH_ROWS, ExcessTally, tally_excess
from .token_alignment import KINDS, AlignmentChecker, AlignmentTally, tally_agreements

SAMPLED = ("responses", "response_mask", ROLLOUT_LOG_PROBS)
"""Columns of a rollout that ``check_sampled`` reads."""
ALIGNED = ("response_mask", ROLLOUT_LOG_PROBS, "old_log_probs")
"""Columns that ``check_aligned`` reads, after the trainer has computed its own log-probs."""
_NAMES = tuple(f"concordance_{kind}" for kind in KINDS)


_NOT_READY = "fields are not ready"
"""TransferQueue's error if some rows lack a column; a column that all rows lack is omitted without an error."""


class RolloutChecker:
    """Checker of each batch of one run, in the trainer's process.

    Args:
        allow_unrelated: measure alignment, and never raise on it.
    """

    def __init__(self, *, allow_unrelated: bool = False) -> None:
        self._alignment = AlignmentChecker(allow_unrelated)
        self._excess = ExcessTally(rows=ENOUGH_ROWS if allow_unrelated else 0)
        self._metrics: dict[str, float] = {}

    def check_sampled(self, rows: TensorDict) -> list[int]:
        """Check that mu holds log-probs; return the checksums of its rows, see ``micro_batch.compute_row_checksums``.

        Args:
            rows: with ``SAMPLED``, (B, T) each, nested or padded.

        Raises:
            RolloutLogProbError: mu is missing, or holds no log-probs.
        """
        responses, mask, mu = _take_columns(rows, SAMPLED)
        check_arrived(mu, mask)
        return compute_row_checksums(responses, mask, mu)

    def check_aligned(self, rows: TensorDict, groups: Sequence[str] | None = None) -> None:
        """Check mu against the log-probs that the trainer computed.

        Args:
            rows: with ``ALIGNED``, (B, T) each, nested or padded; with "responses" to tell equal rows of a group.
            groups: prompt of each row.

        Raises:
            RolloutLogProbError: zeros replace mu, or mu is not the distribution that tokens were sampled from.
            AlignmentError: mu is off by one token or belongs to other rows.
        """
        mask, mu, log_prob = _take_columns(rows, ALIGNED)
        check_zeros(mu, log_prob, mask)
        self.check_tallies([tally_agreements(log_prob, mu, mask, groups)])
        check_placeholders(mu, log_prob, mask, rows.get("responses", None), groups)
        if self._excess.rows < ENOUGH_ROWS:
            self._excess += tally_excess(mu, log_prob, mask)
            self._excess.judge()

    def check_tallies(self, tallies: Iterable[AlignmentTally | None]) -> None:
        """Check the workers' tallies; where pi_old is mu, only the current policy can reveal a fault.

        Raises:
            AlignmentError: mu is off by one token or belongs to other rows.
        """
        self._metrics = self._alignment.judge(sum((one for one in tallies if one is not None), AlignmentTally()))

    def metrics(self) -> dict[str, float]:
        """Return ``alignment/...`` of the last update; NaN if too few pairs were counted."""
        return {f"alignment/{name}": self._metrics.get(name, math.nan) for name in _NAMES}


@contextlib.contextmanager
def name_missing_column() -> Iterator[None]:
    """Turn a failed fetch of ``SAMPLED`` into ``RolloutLogProbError`` if mu is missing: TransferQueue names no column.

    Raises:
        RolloutLogProbError: some rows have no mu. Every rollout has the other columns of ``SAMPLED``.
    """
    try:
        yield
    except ValueError as error:
        if _NOT_READY in str(error) or ROLLOUT_LOG_PROBS in str(error):
            raise build_missing_error(f"rows without them ({error})") from error
        raise


def pad_columns(rows: TensorDict, names: Sequence[str]) -> list[Tensor]:
    """Take columns of a rollout, (B, T) each, padded with zeros where they are nested.

    Raises:
        RolloutLogProbError: mu is missing.
    """
    return [column.to_padded_tensor(0) if column.is_nested else column for column in _take_columns(rows, names)]


def _take_columns(rows: TensorDict, names: Sequence[str]) -> list[Tensor]:
    if ROLLOUT_LOG_PROBS not in rows.keys():
        raise build_missing_error(", ".join(sorted(map(str, rows.keys()))))
    return [rows[name] for name in names]
