"""Parts that steps contribute to an attribution: sums that add up, worst examples, and rows to look for causes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...recording import Rows, concatenate
from .decomposition import MismatchSums, VersionSums, resample_rows, sum_by_version
from .faults import has_stale_tokens
from .profiles import Array, BucketSums, Profiles, compute_k3, select_valid_tokens, sum_profiles
from .row_sample import RowSample
from .row_sums import compute_routing_sums, compute_row_sums
from .token_text import TokenDecoder
from .worst_examples import WorstRow, WorstToken, find_worst_rows, find_worst_tokens, hash_context

BLOCK: Final = 2**16
"""Tokens that are summed at a time."""
Example = TypeVar("Example", WorstToken, WorstRow)
Sums = TypeVar("Sums", VersionSums, BucketSums)


@dataclass(frozen=True)
class Part:
    """Contribution of some steps; parts of successive steps add up.

    Attributes:
        worst: number of tokens and of rows that are listed.
        rows: number of rows that are attributed.
        left_out: number of rows without pi_old, see ``scored_rows.ScoredRows``.
        tokens: number of valid tokens.
        sums, versions, profiles: as their functions make them.
        k3: sum of k3(log pi/mu) over the tokens.
        worst_tokens, worst_rows: by ``hash_context``, the worst first, with shares of ``k3``, rows numbered from the
            first.
        stale: whether a token is recorded as stale.
        samples: of the rows, by step or piece of one.
    """

    worst: int
    rows: int
    left_out: int
    tokens: int
    sums: MismatchSums
    versions: Mapping[int, VersionSums]
    profiles: Profiles
    k3: float
    worst_tokens: Mapping[bytes, WorstToken]
    worst_rows: Mapping[bytes, WorstRow]
    stale: bool
    samples: tuple[Rows, ...]

    def __add__(self, later: Part) -> Part:
        k3 = self.k3 + later.k3
        tokens = merge_copies(
            self._share(self.worst_tokens, k3), later._share(later.worst_tokens, k3, self.rows), key=_size_of_token
        )
        rows = merge_copies(
            self._share(self.worst_rows, k3), later._share(later.worst_rows, k3, self.rows), key=_size_of_row
        )
        return Part(
            worst=self.worst,
            rows=self.rows + later.rows,
            left_out=self.left_out + later.left_out,
            tokens=self.tokens + later.tokens,
            sums=self.sums + later.sums,
            versions=add_by_key(self.versions, later.versions),
            profiles=add_profiles(self.profiles, later.profiles),
            k3=k3,
            worst_tokens=dict(tokens[: self.worst]),
            worst_rows=dict(rows[: self.worst]),
            stale=self.stale or later.stale,
            samples=self.samples + tuple(rows for rows in later.samples if len(rows)),
        )

    def _share(self, examples: Mapping[bytes, Example], k3: float, rows_before: int = 0) -> dict[bytes, Example]:
        """Return examples of these steps as examples of more of them, with shares of their ``k3``."""
        return {
            context: replace(each, row=each.row + rows_before, share=each.share * self.k3 / k3)
            for context, each in examples.items()
        }


def _size_of_token(token: WorstToken) -> float:
    return float(compute_k3(np.array(token.total)))


def _size_of_row(row: WorstRow) -> float:
    return row.k3


def merge_copies(
    one: Mapping[bytes, Example], other: Mapping[bytes, Example], key: Callable[[Example], float]
) -> list[tuple[bytes, Example]]:
    """Merge examples by context, the largest first; of a context in both the larger stands for all its rows."""
    merged = dict(one)
    for context, each in other.items():
        if copy := merged.get(context):
            count, share = copy.count + each.count, copy.share + each.share
            merged[context] = replace(max(copy, each, key=key), count=count, share=share)
        else:
            merged[context] = each
    # Stable: of equals the earlier comes first.
    return sorted(merged.items(), key=lambda item: -key(item[1]))


def add_by_key(one: Mapping[int, Sums], other: Mapping[int, Sums]) -> dict[int, Sums]:
    """Add the sums of each key, where it is in both."""
    return {**one, **{key: one[key] + found if key in one else found for key, found in other.items()}}


def add_profiles(one: Profiles, other: Profiles) -> Profiles:
    """Add the sums of each bucket of each profile."""
    return {name: add_by_key(found, other[name]) for name, found in one.items()}


def add_piece(total: Part, piece: Part, sample: RowSample | None) -> Part:
    """Add a piece of a step to those before it.

    Args:
        sample: of the rows to look for causes in; None: all.
    """
    added = total + piece
    rows = concatenate(added.samples)
    return replace(added, samples=(rows if sample is None else rows.take(sample.choose(rows, spare=True)),))


def choose_sample(step: Part, sample: RowSample) -> Part:
    """Choose the sample of a step from the rows that its pieces brought."""
    (rows,) = step.samples
    return replace(step, samples=(rows.take(sample.choose(rows)),))


def summarize_step(
    step: int,
    rows: Rows,
    reader: TokenDecoder,
    *,
    worst: int,
    left_out: int = 0,
    sample: RowSample | None = None,
    piece: int = 0,
) -> Part:
    """Summarize the rows of one step, or of a piece of it.

    Args:
        rows: with log pi_old by the trainer's own weights.
        worst: tokens and rows to list.
        left_out: rows besides whose pi_old is not known.
        sample: of the rows to look for causes in; None: all. With a spare prompt, see ``choose_sample``.
        piece: number of the piece.
    """
    blocks = [summarize_block(rows.between(*bounds)) for bounds in iterate_bounds(rows.offsets)]
    sums, loss = (np.concatenate([getattr(block, name) for block in blocks]) for name in ("sums", "loss"))
    worst_tokens = find_worst_tokens(rows, loss, reader, worst)
    worst_rows = find_worst_rows(rows, sums, reader, worst)
    return Part(
        worst=worst,
        rows=len(rows),
        left_out=left_out,
        tokens=sum(block.tokens for block in blocks),
        sums=resample_rows(sums, compute_routing_sums(rows), (0, step, piece)),
        versions=reduce(add_by_key, (block.versions for block in blocks)),
        profiles=reduce(add_profiles, (block.profiles for block in blocks)),
        k3=float(loss.sum()),
        worst_tokens={hash_context(rows, each.row, each.position + 1): each for each in worst_tokens},
        worst_rows={hash_context(rows, each.row): each for each in worst_rows},
        stale=any(block.stale for block in blocks),
        samples=(rows if sample is None else rows.take(sample.choose(rows, spare=True)),),
    )


@dataclass(frozen=True)
class Block:
    """Sums of some rows of a step.

    Attributes:
        tokens: number of valid tokens.
        sums: (N, *SHAPE), of ``compute_row_sums``.
        loss: (M,) k3 of log pi/mu, 0 where a token is not valid.
        versions, profiles, stale: as ``Part`` has them.
    """

    tokens: int
    sums: Array
    loss: Array
    versions: Mapping[int, VersionSums]
    profiles: Profiles
    stale: bool


def summarize_block(rows: Rows) -> Block:
    """Sum some rows of a step, few enough that what is computed of each token stays in the cache."""
    tokens = select_valid_tokens(rows)
    sums, loss = compute_row_sums(rows, tokens), tokens.total_k3
    if len(loss) < rows.tokens:
        loss = np.zeros(rows.tokens)
        loss[tokens.index] = tokens.total_k3
    return Block(
        tokens=len(tokens.row),
        sums=sums,
        loss=loss,
        versions=sum_by_version(sums, rows),
        profiles=sum_profiles(rows, tokens),
        stale=has_stale_tokens(rows),
    )


def iterate_bounds(offsets: NDArray[np.int64], size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Yield first and behind the last row of blocks of at most ``size`` tokens, or of one row; one without rows."""
    start, rows = 0, len(offsets) - 1
    while start < rows or start == 0:
        stop = int(np.searchsorted(offsets, offsets[start] + size, side="right")) - 1
        stop = min(max(stop, start + 1), rows)
        yield start, stop
        start = max(stop, 1)
