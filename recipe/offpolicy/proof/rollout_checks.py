"""Checks at every update that the rollout's log-probs are present and finite, and belong to their tokens.

The cost is small compared with a step: one checksum per sequence and a few sign comparisons. ``verify`` judges the
first update; these checks judge every update.

With the same weights, the same engine computes the same log-prob for a token, so the forward pass for pi_old repeats
the rollout's. In the first step of a run, this module checks this on every token, using the forward pass that later
steps skip.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..batch.seals import compute_row_checksums
from ..correction.proximal import TOLERANCE
from .rollout_log_probs import (
    ENOUGH_ROWS,
    ExcessTally,
    build_missing_error,
    check_arrived,
    check_placeholders,
    check_zeros,
    tally_excess,
)
from .token_alignment import KINDS, AlignmentChecker, AlignmentTally, tally_agreements

SAMPLED = ("responses", "response_mask", ROLLOUT_LOG_PROBS)
"""Columns of a rollout that ``check_sampled`` reads."""
ALIGNED = ("response_mask", ROLLOUT_LOG_PROBS, "old_log_probs")
"""Columns that ``check_aligned`` reads, after the trainer has computed its own log-probs."""
_NAMES = tuple(f"concordance_{kind}" for kind in KINDS)


_NOT_READY = "fields are not ready"
"""TransferQueue's error if only some rows lack a column; if all rows lack the column, it is omitted without an
error."""


class RolloutChecker:
    """Checker of a run's batches, in the trainer's process.

    Args:
        allow_unrelated: measure alignment, but never raise an error because of it.
    """

    def __init__(self, *, allow_unrelated: bool = False) -> None:
        self._alignment = AlignmentChecker(allow_unrelated)
        self._excess = ExcessTally(rows=ENOUGH_ROWS if allow_unrelated else 0)
        self._metrics: dict[str, float] = {}

    def check_sampled(self, rows: TensorDict) -> list[int]:
        """Check that mu contains log-probs; return the rows' checksums, see ``seals.compute_row_checksums``.

        Args:
            rows: contains the columns in ``SAMPLED``, (B, T) each, nested or padded.

        Raises:
            RolloutLogProbError: mu is missing or does not contain log-probs.
        """
        responses, mask, mu = _take_columns(rows, SAMPLED)
        check_arrived(mu, mask)
        return compute_row_checksums(responses, mask, mu)

    def check_aligned(self, rows: TensorDict, groups: Sequence[str] | None = None) -> None:
        """Check mu against the log-probs that the trainer has computed.

        Args:
            rows: contains the columns in ``ALIGNED``, (B, T) each, nested or padded; "responses" is also needed to
                recognise equal rows of a group.
            groups: prompt of each row.

        Raises:
            RolloutLogProbError: mu was replaced with zeros, or is not the distribution from which tokens were sampled.
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
        """Check the workers' tallies. If pi_old is mu, only a comparison with the current policy can reveal a fault.

        Raises:
            AlignmentError: mu is off by one token or belongs to other rows.
        """
        self._metrics = self._alignment.judge(sum((one for one in tallies if one is not None), AlignmentTally()))

    def metrics(self) -> dict[str, float]:
        """Return ``alignment/...`` of the last update; NaN if too few pairs were counted."""
        return {f"alignment/{name}": self._metrics.get(name, math.nan) for name in _NAMES}


@contextlib.contextmanager
def name_missing_column() -> Iterator[None]:
    """Convert a failed fetch of ``SAMPLED`` to ``RolloutLogProbError`` if mu is missing; TransferQueue names no column.

    Raises:
        RolloutLogProbError: some rows have no mu. (The other columns in ``SAMPLED`` exist in every rollout.)
    """
    try:
        yield
    except ValueError as error:
        if _NOT_READY in str(error) or ROLLOUT_LOG_PROBS in str(error):
            raise build_missing_error(f"rows without them ({error})") from error
        raise


def pad_columns(rows: TensorDict, names: Sequence[str]) -> list[Tensor]:
    """Return columns of a rollout as (B, T) tensors; nested columns are padded with zeros.

    Raises:
        RolloutLogProbError: mu is missing.
    """
    return [column.to_padded_tensor(0) if column.is_nested else column for column in _take_columns(rows, names)]


def _take_columns(rows: TensorDict, names: Sequence[str]) -> list[Tensor]:
    if ROLLOUT_LOG_PROBS not in rows.keys():
        raise build_missing_error(", ".join(sorted(map(str, rows.keys()))))
    return [rows[name] for name in names]


_FIX = "Set correction.proximal=recompute: rollout and trainer are different engines, or use different dtypes."


class SameEngineError(RuntimeError):
    """mu differs from pi_old although ``correction.proximal=same_engine``; the message names the place."""


def measure_difference(rollout_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Compute |log mu - log pi_old| of each token.

    Args:
        rollout_log_prob, old_log_prob: (B, T).
        response_mask: (B, T) bool or 0/1.

    Returns:
        (B, T) float64 nats, 0 where the mask is False, inf where a log-prob is not finite.

    Example:
        >>> mask = torch.tensor([[1, 1, 0]])
        >>> measure_difference(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.0, -2.5, -9.0]]), mask).tolist()
        [[0.0, 0.5, 0.0]]
    """
    apart = (rollout_log_prob.double() - old_log_prob.double()).abs()
    apart = torch.where(torch.isfinite(apart), apart, torch.inf)
    return torch.where(response_mask.bool(), apart, 0.0)


class SameEngineCheck:
    """Check in the trainer's process that remains active until a batch has shown that mu equals pi_old.

    A resumed run is a new process and checks its first step again.

    Attributes:
        largest: largest difference in the judged batch, in nats; None until a batch has been judged.
    """

    def __init__(self) -> None:
        self.largest: float | None = None

    def judge(self, rows: TensorDict, uids: Sequence[str], step: int) -> None:
        """Judge a batch after the trainer has computed pi_old.

        Args:
            rows: contains the columns in ``ALIGNED``, (B, T) each, nested or padded.
            uids: uid of each row's prompt.

        Raises:
            SameEngineError: at some token, mu differs from pi_old by more than ``TOLERANCE``.
        """
        mask, mu, old = pad_columns(rows, ALIGNED)
        apart = measure_difference(mu, old, mask)
        if not apart.numel() or not mask.any():
            return
        largest, place = apart.flatten().max(0)
        row, token = divmod(int(place), apart.shape[1])
        # The condition is written so that NaN also fails.
        if not largest <= TOLERANCE:
            beyond = int((apart > TOLERANCE).sum())
            raise SameEngineError(
                f"correction.proximal=same_engine: |mu - pi_old| is {float(largest):.3g} nats at step {step}, sequence "
                f"{row} (uid {uids[row]}), response token {token}: log mu is {float(mu[row, token]):.7g}, log pi_old "
                f"{float(old[row, token]):.7g}. {beyond} of {int(mask.bool().sum())} tokens differ by more than "
                f"{TOLERANCE:g}. {_FIX}"
            )
        self.largest = float(largest)

    def metrics(self) -> dict[str, float]:
        """Return ``same_engine/largest_difference``; NaN until a batch has been judged."""
        return {"same_engine/largest_difference": math.nan if self.largest is None else self.largest}

    @property
    def passed(self) -> bool:
        """True after a batch has shown that mu equals pi_old."""
        return self.largest is not None
