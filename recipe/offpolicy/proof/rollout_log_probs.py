"""Checks at every update that the rollout's log-probs are present, finite and aligned with their tokens.

``verify`` runs a full proof only at some updates. The checks in this module run at every update; they cost one checksum
per sequence and a few sign comparisons.

The sum over the vocabulary of mu(v) * pi_old(v) / mu(v) is 1 for any pi_old, however different the weights are. An
engine that samples from p but reports q yields the sum of p * pi_old / q instead. With pi_old = p, this sum is
1 + chi2(p | q) > 1, for example if the engine reports raw log-probs or log-probs at another temperature. The excess is
a martingale over tokens, so responses may end at any token.

With the same weights, the same engine computes the same log-prob for a token. In the first step of a run with
``proximal=same_engine``, mu and pi_old are compared at all tokens, using the forward pass that later steps skip.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.micro_batch import ROLLOUT_LOG_PROBS
from ..batch.seals import compute_row_checksums
from ..correction.correction_parts import TOLERANCE as SAME_ENGINE_TOLERANCE
from ..correction.row_layout import BLOCK, RowLayout, detect_layout, split_tokens
from ..correction.statistics import DeferredValue
from .token_alignment import KINDS, AlignmentChecker, AlignmentTally, tally_agreements

LEAST_TOKENS = 8
"""Minimum number of tokens in a sequence, or in a batch, for a verdict."""
FAR = 1.0
"""Smallest |log pi_old - log mu|, in nats, at which a token's mu may be a placeholder."""
UNSURE = 0.1
"""Mean -log pi_old, in nats per token, above which an all-zero sequence cannot be the rollout engine's log-probs."""


class RolloutLogProbError(RuntimeError):
    """The rollout engine returned no usable log-probs; the message says what it returned."""


@dataclass(frozen=True)
class Column:
    """A column of log-probs that a server returned, and the wording of errors about this column.

    Attributes:
        most_nonfinite: largest accepted share of non-finite values.
    """

    name: str = "rollout_log_probs"
    fix: str = "Check the rollout engine's log and set actor_rollout_ref.rollout.calculate_log_probs=true."
    error: type[RuntimeError] = RolloutLogProbError
    most_nonfinite: float = 0.5


MU = Column()


def build_missing_error(present: object) -> RolloutLogProbError:
    """Build the error for a batch without rollout log-probs; ``present`` names what the batch contains."""
    return RolloutLogProbError(f"{MU.name} are missing: the batch contains only {present}. {MU.fix}")


def check_arrived(rollout_log_prob: Tensor, response_mask: Tensor, column: Column = MU) -> None:
    """Check that the values of mu can be log-probs, without comparing them with another policy.

    Args:
        rollout_log_prob: (B, T) log mu, or nested by row like the mask; or the column that ``column`` names.
        response_mask: (B, T) bool or 0/1.

    Raises:
        RolloutLogProbError: most values of mu are not finite, are above 0, or equal one constant; or ``column.error``.
    """
    rows = detect_layout(mu=rollout_log_prob, mask=response_mask)
    columns = (rows.tokens(each).flatten().split(BLOCK) for each in (rollout_log_prob, response_mask))
    tokens, lost, low, high = 0, 0, math.inf, -math.inf
    for values, mask in zip(*columns, strict=True):
        if not len(values):
            continue
        there, mu = mask.bool(), values.float()
        # Boolean indexing takes ten times as long as arithmetic with the mask.
        finite = there & (mu.abs() < math.inf)
        counted, kept = int(there.sum()), int(finite.sum())
        tokens, lost = tokens + counted, lost + counted - kept
        low = min(low, float(torch.where(finite, mu, math.inf).amin()))
        high = max(high, float(torch.where(finite, mu, -math.inf).amax()))
    name, fix = column.name, column.fix
    if lost > column.most_nonfinite * tokens:
        raise column.error(f"{name} are missing: {lost} of {tokens} are not finite. {fix}")
    # Rounding can put the log-prob of a near-certain token slightly above 0.
    if high > 1e-3:
        raise column.error(f"{name} are not log-probs: the maximum is {high:.3g}, above 0. {fix}")
    # All zeros are valid for an engine that is certain of each token; check_zeros compares with the trainer's policy.
    if tokens >= LEAST_TOKENS and low == high != 0.0:
        raise column.error(f"{name} are missing: all {tokens} values are the placeholder {low:.3g}. {fix}")


def check_zeros(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor, column: Column = MU) -> None:
    """Check that the trainer's policy is also certain of sequences whose mu is all zeros; see ``find_zero_rows``.

    Args:
        rollout_log_prob, trainer_log_prob, response_mask: as in ``find_zero_rows``, or nested by row.

    Raises:
        RolloutLogProbError: the log-probs of some or all sequences were replaced with zeros; or ``column.error``.
    """
    columns = {"mu": rollout_log_prob, "trainer": trainer_log_prob, "mask": response_mask}
    counts = [_count_zero_rows(rows, **block) for _, rows, block in split_tokens(columns)]
    _judge_zeros(len(rollout_log_prob), torch.stack(counts).sum(0).tolist(), column)


@torch.no_grad()
def check_placeholders(
    rollout_log_prob: Tensor,
    trainer_log_prob: Tensor,
    response_mask: Tensor,
    tokens: Tensor | None = None,
    groups: Sequence[str] | None = None,
) -> None:
    """Check that mu was not replaced with a placeholder at some tokens, such as end tokens that an agent loop appended.

    A value is a placeholder if it is 0 in two rows, or the same number in eight rows at the same token id, and the
    trainer's log-probs there are far from it. This must hold in 1 % of the rows and for half of the tokens with this
    number. Rows of one group with equal tokens count once, because an engine computes equal log-probs for them.

    Args:
        rollout_log_prob, trainer_log_prob, response_mask: (B, T), or nested by row.
        tokens: token ids, which the error names.
        groups: prompt of each row.

    Raises:
        RolloutLogProbError: a placeholder was found.
    """
    rows = detect_layout(mu=rollout_log_prob, trainer=trainer_log_prob, mask=response_mask)
    mu, trainer, mask = (rows.tokens(each) for each in (rollout_log_prob, trainer_log_prob, response_mask))
    far = mask.bool() & ((trainer - mu).abs() > FAR)
    if not far.any():
        return
    row = rows.broadcast(rows.to_column(torch.arange(rows.count))).expand(far.shape)[far]
    end = rows.cumulative_count(torch.ones_like(far))[far]
    values, gaps = mu[far], trainer[far]
    value, count = values.unique(return_counts=True)
    for number in {0.0, float(value[count.argmax()])}:
        here = values == number
        held, enough = len(row[here].unique()), max(2 if number == 0 else LEAST_TOKENS, rows.count / 100)
        ids = [] if tokens is None else rows.tokens(tokens)[far][here].unique().tolist()
        if held < enough or int(here.sum()) * 2 < int((mask.bool() & (mu == number)).sum()):
            continue
        if tokens is not None and groups is not None:
            ends, given = zip(row[here].tolist(), end[here].tolist(), strict=True), tokens.unbind()
            if len({(groups[at], *given[at][:stop].tolist()) for at, stop in ends}) < enough:
                continue
        if number == 0 or len(ids) == 1:
            named = f", {'all' if len(ids) == 1 else 'some'} with the id {ids[0]}" if ids else ""
            raise RolloutLogProbError(
                f"{MU.name} are exactly {number:g} at {int(here.sum())} tokens in {held} of {rows.count} sequences, "
                f"where the trainer's mean probability is e^{float(gaps[here].mean()):.3g}{named}: the number is a "
                f"placeholder for tokens that were not sampled. Set response_mask=0 in the agent loop at tokens that "
                f"it appends itself, or return their log-probs."
            )


@torch.no_grad()
def find_zero_rows(rollout_log_prob: Tensor, trainer_log_prob: Tensor, response_mask: Tensor) -> DeferredValue[None]:
    """Count all-zero rows on the device; fetching the value raises ``RolloutLogProbError``.

    Args:
        rollout_log_prob: (B, T) log mu.
        trainer_log_prob: (B, T) log pi_old.
        response_mask: (B, T) bool or 0/1.
    """
    rows = detect_layout(mu=rollout_log_prob, trainer=trainer_log_prob, mask=response_mask)
    found = _count_zero_rows(rows, *map(rows.tokens, (rollout_log_prob, trainer_log_prob, response_mask)))
    return DeferredValue(found, partial(_judge_zeros, len(response_mask)))


def _count_zero_rows(rows: RowLayout, mu: Tensor, trainer: Tensor, mask: Tensor) -> Tensor:
    """Count all-zero rows, those that the trainer contradicts, the tokens of the latter, and all tokens: (4,) int64.

    Args:
        mu, trainer, mask: flat tensors of tokens in this layout.
    """
    there = mask.bool()
    tokens = rows.sum(there)
    unsure = -rows.sum(torch.where(there, trainer.float().nan_to_num(), 0.0))
    zero = (rows.sum(there & (mu != 0)) == 0) & (unsure > UNSURE * tokens)
    telling = zero & (tokens >= LEAST_TOKENS)
    return torch.stack([zero.sum(), telling.sum(), (tokens * zero).sum().long(), tokens.sum().long()])


def _judge_zeros(rows: int, numbers: list[int], column: Column = MU) -> None:
    zero, telling, tokens_of_zero, tokens = numbers
    # Rows that are too short for individual verdicts are checked together.
    together = tokens_of_zero >= max(LEAST_TOKENS, tokens // 2)
    if telling or together:
        raise column.error(
            f"{column.name} are missing: {zero} of {rows} sequences contain only zeros, but the trainer's policy has a "
            f"mean -log pi above {UNSURE:g} nats per token for these sequences. {column.fix}"
        )


LEAST_ROWS, ENOUGH_ROWS = 32, 256
"""Minimum number of responses for a verdict, and the number of responses after which the check ends."""
TOLERANCE, ERRORS = 0.02, 5.0
"""Largest excess of the mean over 1 that rounding may cause, and the number of standard errors (over responses) added
to it."""
_LARGEST = 20.0
"""Cap of a log-ratio before exp, in nats."""


@dataclass(frozen=True)
class ExcessTally:
    """Sums of pi_old / mu - 1 over responses; plain Python values that add up over batches.

    Attributes:
        total, squares: sums over responses of each response's sum, and of its square.
    """

    total: float = 0.0
    squares: float = 0.0
    tokens: int = 0
    rows: int = 0

    def __add__(self, other: ExcessTally) -> ExcessTally:
        return ExcessTally(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def judge(self) -> None:
        """Raise ``RolloutLogProbError`` if the mean exceeds 1 by more than rounding and chance can explain."""
        if self.rows < LEAST_ROWS:
            return
        mean, error = self.total / self.tokens, math.sqrt(self.squares) / self.tokens
        if mean - ERRORS * error > TOLERANCE:
            raise RolloutLogProbError(
                f"tokens were not sampled from the distribution that rollout_log_probs report: the mean of pi_old / mu "
                f"over {self.tokens} tokens is {1 + mean:.3f} (standard error {error:.3f}), but must be 1. Configure "
                f"the rollout engine to return processed log-probs at actor_rollout_ref.rollout.temperature. If this "
                f"is intended, set offpolicy.allow_unrelated_log_probs=true."
            )


@torch.no_grad()
def tally_excess(rollout_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> ExcessTally:
    """Sum pi_old / mu - 1 per response, skipping tokens at which either log-prob is not finite.

    Args:
        rollout_log_prob, old_log_prob: (B, T), or nested by row.
        response_mask: (B, T) bool or 0/1, or nested by row like them.

    Example:
        >>> mask = torch.ones(2, 2)
        >>> tally_excess(torch.tensor([[0.5, 0.5], [0.25, 0.5]]).log(), torch.full((2, 2), 0.5).log(), mask)
        ExcessTally(total=1.0, squares=1.0, tokens=4, rows=2)
    """
    columns = {"mu": rollout_log_prob, "old": old_log_prob, "mask": response_mask}
    found = ExcessTally()
    for _, rows, block in split_tokens(columns):
        apart = block["old"].double() - block["mu"].double()
        there = block["mask"].bool() & torch.isfinite(apart)
        by_row = rows.sum(torch.where(there, apart.clamp(max=_LARGEST).expm1(), 0.0))
        tokens = rows.sum(there)
        sums = torch.stack([by_row.sum(), by_row.square().sum(), tokens.sum(), (tokens > 0).sum()]).tolist()
        found += ExcessTally(sums[0], sums[1], int(sums[2]), int(sums[3]))
    return found


SAMPLED = ("responses", "response_mask", ROLLOUT_LOG_PROBS)
"""Columns of a rollout that ``check_sampled`` reads."""
ALIGNED = ("response_mask", ROLLOUT_LOG_PROBS, "old_log_probs")
"""Columns that ``check_aligned`` reads, after the trainer has computed its own log-probs."""
_NAMES = tuple(f"concordance_{kind}" for kind in KINDS)


_NOT_READY = "fields are not ready"
"""TransferQueue's error if only some rows lack a column. If all rows lack the column, TransferQueue omits it without an
error."""


class RolloutChecker:
    """Checker of a run's batches, in the trainer's process.

    Args:
        allow_unrelated: measure alignment, but raise no error if mu is misaligned.
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
            RolloutLogProbError: mu was replaced with zeros, or tokens were sampled from a different distribution.
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


def _take_columns(rows: TensorDict, names: Sequence[str]) -> list[Tensor]:
    if ROLLOUT_LOG_PROBS not in rows.keys():
        raise build_missing_error(", ".join(sorted(map(str, rows.keys()))))
    return [rows[name] for name in names]


_FIX = "Set correction.proximal=recompute: rollout and trainer are different engines, or use different dtypes."


class SameEngineError(RuntimeError):
    """mu differs from pi_old with ``correction.proximal=same_engine``; the message names step, sequence and token."""


def measure_difference(rollout_log_prob: Tensor, old_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Compute |log mu - log pi_old| of each token, (B, T): 0 where the mask is False, inf for non-finite log-probs.

    Example:
        >>> mask = torch.tensor([[1, 1, 0]])
        >>> measure_difference(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.0, -2.5, -9.0]]), mask).tolist()
        [[0.0, 0.5, 0.0]]
    """
    apart = (rollout_log_prob.double() - old_log_prob.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return apart.where(response_mask.bool(), 0.0)


class SameEngineCheck:
    """Check in the trainer's process, active until a batch has shown that mu equals pi_old.

    A resumed run is a new process and checks its first step again.

    Attributes:
        largest: largest difference in the checked batch, in nats; None until a batch has been checked.
    """

    def __init__(self) -> None:
        self.largest: float | None = None

    def judge(self, rows: TensorDict, uids: Sequence[str], step: int) -> None:
        """Check a batch after the trainer has computed pi_old.

        Args:
            rows: contains the columns in ``ALIGNED``, (B, T) each, nested or padded.
            uids: uid of each row's prompt.

        Raises:
            SameEngineError: at some token, mu differs from pi_old by more than ``SAME_ENGINE_TOLERANCE``.
        """
        columns = _take_columns(rows, ALIGNED)
        mask, mu, old = (each.to_padded_tensor(0) if each.is_nested else each for each in columns)
        apart = measure_difference(mu, old, mask)
        if not apart.numel() or not mask.any():
            return
        largest, place = apart.flatten().max(0)
        row, token = divmod(int(place), apart.shape[1])
        # With this form of the condition, NaN also fails.
        if not largest <= SAME_ENGINE_TOLERANCE:
            beyond = int((apart > SAME_ENGINE_TOLERANCE).sum())
            raise SameEngineError(
                f"correction.proximal=same_engine: |mu - pi_old| is {float(largest):.3g} nats at step {step}, sequence "
                f"{row} (uid {uids[row]}), response token {token}: log mu is {float(mu[row, token]):.7g}, log pi_old "
                f"{float(old[row, token]):.7g}. {beyond} of {int(mask.bool().sum())} tokens differ by more than "
                f"{SAME_ENGINE_TOLERANCE:g}. {_FIX}"
            )
        self.largest = float(largest)

    def metrics(self) -> dict[str, float]:
        """Return ``same_engine/largest_difference``; NaN until a batch has been checked."""
        return {"same_engine/largest_difference": math.nan if self.largest is None else self.largest}

    @property
    def passed(self) -> bool:
        """True after a batch has shown that mu equals pi_old."""
        return self.largest is not None
