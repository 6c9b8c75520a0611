"""Token alignment: compares mu with the trainer's log-probs over a batch to check that mu belongs to its tokens.

If two rows differ at a position, the rollout engine and the trainer usually assign the higher log-prob to the same row.
This is true for any mismatch, even with stale weights, so the share of pairs on which they agree is near 1. If the
log-probs belong to other rows, engine and trainer agree only by chance, on half of the pairs. If the log-probs are off
by one token, shifting mu by one token improves the agreement. Only signs are counted, so neither a drift common to all
tokens nor one extreme token affects the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..correction.statistics import DeferredValue, fetch

MARGIN = 0.1
"""A pair is counted only if its two log-probs differ by at least this many nats under both policies."""
MOST_ELEMENTS = 1 << 18
"""Maximum number of a batch's elements that are compared; larger batches are subsampled evenly by row."""
MOST_POSITIONS = 512
"""Maximum number of tokens per row that are compared."""
LEAST_PAIRS = 128
"""Minimum number of pairs at a lag for a verdict on the concordance at this lag."""
LEAST_ROWS, ENOUGH_ROWS = 32, 128
"""Minimum number of rows for a verdict, and number of rows after which the counts are reset. Until then, updates are
pooled."""
ROWS_OF_A_GROUP = 2
"""Maximum number of rows of one prompt that count as independent."""
BETTER_BESIDE = 0.2
"""If shifting mu by one token raises the concordance by at least this much, mu is off by one; the limit is higher for
few rows."""

LAGS = (-1, 0, 1)
KINDS = ("rows", "siblings", "tokens")


@dataclass(frozen=True)
class PairCounts:
    """Counts of informative pairs, and of pairs on which both policies agree, with mu shifted by each of ``LAGS``.

    Attributes:
        rows: number of independent rows with such a pair at lag 0.
    """

    pairs: tuple[int, ...] = (0, 0, 0)
    agreeing: tuple[int, ...] = (0, 0, 0)
    rows: int = 0

    def __add__(self, other: PairCounts) -> PairCounts:
        pairs, agreeing = (
            tuple(map(sum, zip(*each, strict=True)))
            for each in ((self.pairs, other.pairs), (self.agreeing, other.agreeing))
        )
        return PairCounts(pairs, agreeing, self.rows + other.rows)

    def is_enough(self, lag: int) -> bool:
        """Return True if there are enough pairs at this lag for a verdict."""
        return self.pairs[LAGS.index(lag)] >= LEAST_PAIRS

    def concordance(self, lag: int = 0) -> float:
        """Compute (agreeing - disagreeing) / pairs: 1 if all agree, about 0 by chance, 0.0 if there are no pairs."""
        place = LAGS.index(lag)
        return 2.0 * self.agreeing[place] / self.pairs[place] - 1.0 if self.pairs[place] else 0.0


@dataclass(frozen=True)
class AlignmentTally:
    """Counts of agreement between mu and the trainer's policy, in plain Python values that add up over micro-batches
    and updates.

    Attributes:
        rows: pairs of two rows at the same position.
        siblings: pairs of two rows of one prompt; counted only if groups are given.
        tokens: pairs of two neighbouring tokens of a row.
    """

    rows: PairCounts = PairCounts()
    siblings: PairCounts = PairCounts()
    tokens: PairCounts = PairCounts()

    def __add__(self, other: AlignmentTally) -> AlignmentTally:
        return AlignmentTally(self.rows + other.rows, self.siblings + other.siblings, self.tokens + other.tokens)


def tally_agreements(
    trainer_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, groups: Sequence[str] | None = None
) -> AlignmentTally:
    """Compute ``count_agreements`` and copy it to the host."""
    (found,) = fetch([count_agreements(trainer_log_prob, rollout_log_prob, response_mask, groups)])
    assert isinstance(found, AlignmentTally)
    return found


@torch.no_grad()
def count_agreements(
    trainer_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, groups: Sequence[str] | None = None
) -> DeferredValue[AlignmentTally]:
    """Count agreements in one batch, or in some of its rows.

    Args:
        trainer_log_prob: (B, T) log pi_old, or log pi if pi_old is mu; detached. All columns may be nested by row.
        rollout_log_prob: (B, T) log mu.
        response_mask: (B, T) bool or 0/1.
        groups: prompt of each row; needed to detect rows swapped within one prompt.
    """
    width = _measure_width(response_mask)
    chosen = _select_rows(len(response_mask), width, groups)
    columns = (trainer_log_prob, rollout_log_prob, response_mask)
    trainer, mu, mask = (_cut(column, width, chosen) for column in columns)
    trainer, mu = trainer.float(), mu.float()
    usable = mask.bool() & torch.isfinite(trainer) & torch.isfinite(mu)
    alike, kinds = None, 0
    if groups is not None:
        names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
        rows = range(len(groups)) if chosen is None else chosen.tolist()
        alike, kinds = torch.tensor([names[groups[row]] for row in rows], device=mu.device), len(names)
    strangers, siblings = [], []
    # Short distances pair siblings, if groups are known.
    for offset in sorted({each for each in (1, 2, len(mu) // 3, len(mu) // 2) if 0 < each < len(mu)}):
        there = tuple(t.roll(offset, 0) for t in (trainer, mu, usable))
        if alike is None:
            strangers.append(((trainer, mu, usable), there))
            continue
        same = (alike == alike.roll(offset, 0))[:, None]
        siblings.append(((trainer, mu, usable & same), there))
        strangers.append(((trainer, mu, usable & ~same), there))
    later, earlier = (tuple(t[:, cut] for t in (trainer, mu, usable)) for cut in (slice(1, None), slice(None, -1)))
    counts = [
        _count_pairs(strangers, mu, alike, kinds),
        _count_pairs(siblings, mu),
        _count_pairs([(later, earlier)], mu),
    ]
    return DeferredValue(torch.cat(counts), _tally)


def _measure_width(mask: Any) -> int:
    """Return the number of compared tokens of the longest row."""
    longest = int(mask.offsets().diff().max()) if mask.is_nested else mask.shape[1]
    # Many rows are more informative than many tokens of a few rows.
    return min(longest, MOST_POSITIONS)


def _cut(column: Any, width: int, chosen: Tensor | None) -> Tensor:
    """Take the first ``width`` tokens of the chosen rows, zero-padded: (rows, width)."""
    rows = slice(None) if chosen is None else chosen.to(column.device)
    if not column.is_nested:
        padded: Tensor = column[:, :width][rows]
        return padded
    there = torch.arange(width, device=column.device)
    absent = there >= column.offsets().diff()[rows][:, None]
    places = (column.offsets()[:-1][rows][:, None] + there).masked_fill_(absent, 0)
    values: Tensor = column.values()
    return values[places].masked_fill(absent, 0)


def _tally(numbers: list[int]) -> AlignmentTally:
    # Three counts of seven integers each, concatenated; see ``PairCounts``.
    return AlignmentTally(
        *(PairCounts(tuple(n[:3]), tuple(n[3:6]), n[6]) for n in (numbers[:7], numbers[7:14], numbers[14:]))
    )


def compute_chance_limit(rows: int) -> float:
    """Compute the concordance below which log-probs of this many rows count as misaligned.

    For unrelated log-probs, the concordance is 0 with a standard deviation of about 0.7 / sqrt(rows). For an aligned
    mu, it is usually >= 0.98. The lowest value observed was 0.44, with weights so stale that KL exceeds 1 nat per
    token.
    """
    return min(0.25, 0.4 - 3.0 / math.sqrt(rows))


class AlignmentError(RuntimeError):
    """A server returned log-probs that do not belong to the tokens returned with them."""


@dataclass
class AlignmentChecker:
    """Checker of tallies, which pools updates until there are enough pairs.

    Args:
        allow_unrelated: only measure, and never raise an error.
        limit: number of rows -> concordance below which log-probs count as belonging to other rows.
        enough: number of rows after which the counts are reset.
        column, short: names that errors use for the column that is compared with the trainer's policy.
        lost: clause of the error that says what becomes impossible if the column is unrelated to the tokens.
    """

    allow_unrelated: bool = False
    limit: Callable[[int], float] = compute_chance_limit
    enough: int = ENOUGH_ROWS
    column: str = "rollout_log_probs"
    short: str = "mu"
    lost: str = "no correction can be computed from them"
    _pending: AlignmentTally = AlignmentTally()

    def judge(self, tally: AlignmentTally) -> dict[str, float]:
        """Add the tally of one update, and check the counts that are large enough.

        Returns:
            Metrics: the concordance for each kind of pair, if there are enough pairs of this kind.

        Raises:
            AlignmentError: mu is off by one token, or belongs to other rows.
        """
        together = vars(self._pending + tally)
        # A few rows are enough if they have many tokens.
        enough = {
            kind: count
            for kind, count in together.items()
            if count.rows >= LEAST_ROWS or max(count.pairs) >= 8 * LEAST_PAIRS
        }
        self._pending = AlignmentTally(**{kind: count for kind, count in together.items() if count.rows < self.enough})
        for kind, count in enough.items():
            if not self.allow_unrelated:
                self._judge(kind, count)
        return {f"concordance_{kind}": count.concordance() for kind, count in enough.items()}

    def _judge(self, kind: str, count: PairCounts) -> None:
        shift, column = find_shift(count), self.column
        here, there = count.concordance(), count.concordance(shift)
        numbers = (
            f"{self.short}'s concordance with the trainer's policy is {here:.2f} for {count.pairs[1]} pairs of {kind}"
        )
        if shift:
            raise AlignmentError(
                f"{column} are off by one token: {numbers}, but {there:.2f} with {self.short} of the token "
                f"{'after' if shift == 1 else 'before'} (1: always, 0: by chance). The component that produces "
                f"{column} drops or repeats a token."
            )
        if kind != "tokens" and count.is_enough(0) and here < self.limit(count.rows):
            raise AlignmentError(
                f"{column} belong to other sequences: {numbers} (1: always, 0: by chance). Sequences were permuted "
                f"between engine and trainer, or the two policies have diverged; either way {self.lost}. If this is "
                f"intended, set offpolicy.allow_unrelated_log_probs=true."
            )


def find_shift(count: PairCounts) -> int:
    """Find the lag, -1 or 1, at which the two policies agree more than at lag 0; 0 if there is no such lag."""
    alongside = max((-1, 1), key=lambda lag: count.concordance(lag) if count.is_enough(lag) else -2.0)
    # Pairs within a row are dependent, so 16 of them count as one row.
    better = max(BETTER_BESIDE, 3.0 / math.sqrt(max(count.rows, max(count.pairs) // 16, 1)))
    shifted = count.concordance(alongside) > max(count.concordance(), 0.0) + better
    return alongside if shifted and count.is_enough(alongside) else 0


Side = tuple[Tensor, ...]
"""The columns trainer, mu and usable, (B, T) each."""


def _count_pairs(
    sides: Sequence[tuple[Side, Side]], like: Tensor, groups: Tensor | None = None, kinds: int = 0
) -> Tensor:
    """Count pairs of elements with the same index on both sides, with the mu of both sides shifted by each lag.

    Args:
        like: a tensor on the same device as all inputs.
        groups: (B,) numbers below ``kinds``, the prompt of each row; None: each row counts on its own.

    Returns:
        (7,) int64, the numbers of a ``PairCounts``: pairs by lag, agreeing pairs by lag, and rows.
    """
    nothing = torch.zeros((), dtype=torch.int64, device=like.device)
    pairs, agreeing, rows = [nothing] * len(LAGS), [nothing] * len(LAGS), None
    for here, there in sides:
        apart, valid = here[0] - there[0], here[2] & there[2]
        mu_apart_here = here[1] - there[1]
        clear, mu_clear = valid & (apart.abs() > MARGIN), valid & (mu_apart_here.abs() > MARGIN)
        greater, mu_greater = apart > 0, mu_apart_here > 0
        for place, lag in enumerate(LAGS):
            telling = clear & _shift(mu_clear, lag)
            pairs[place] = pairs[place] + telling.sum()
            agreeing[place] = agreeing[place] + (telling & (greater == _shift(mu_greater, lag))).sum()
            if lag == 0:
                rows = telling.any(-1) if rows is None else rows | telling.any(-1)
    counted = nothing if rows is None else rows.sum()
    if rows is not None and groups is not None:
        # All rows of a prompt differ from another prompt's rows in the same way, so they add little information.
        telling_groups = torch.zeros(kinds, dtype=torch.int64, device=like.device)
        telling_groups.scatter_reduce_(0, groups, rows.long(), "amax")
        counted = torch.minimum(counted, ROWS_OF_A_GROUP * telling_groups.sum())
    return torch.stack([*pairs, *agreeing, counted])


def _shift(values: Tensor, lag: int) -> Tensor:
    """Shift ``values`` to t + lag, zero-padded."""
    moved = torch.zeros_like(values)
    if lag == 0:
        return values
    if lag > 0:
        moved[:, :-lag] = values[:, lag:]
    else:
        moved[:, -lag:] = values[:, :lag]
    return moved


def _select_rows(rows: int, width: int, groups: Sequence[str] | None) -> Tensor | None:
    """Select evenly spaced rows if there are many, with rows of one prompt adjacent; None: all rows, in order."""
    most = max(16, MOST_ELEMENTS // max(1, width))
    if groups is None and rows <= most:
        return None
    places = range(rows) if groups is None else sorted(range(rows), key=groups.__getitem__)
    order = torch.tensor(places, dtype=torch.long)
    if rows <= most:
        return order
    # Runs of 4 neighbours are drawn, because siblings of one prompt are adjacent and form pairs.
    starts = torch.linspace(0, rows - 4, most // 4).long()
    return order[(starts[:, None] + torch.arange(4)).flatten().unique()]
