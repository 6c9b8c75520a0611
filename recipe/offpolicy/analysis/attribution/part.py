"""Parts that pieces of steps contribute to an attribution: sums, frames that add up, and rows to look for causes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from ...recording import Rows, concatenate
from .decomposition import Array, resample
from .faults import has_stale_tokens
from .frames import PROFILES, compute_routing_sums, count_by_age, merge, place_cells, sum_cells
from .worst_examples import find_worst, merge_copies

_TOGETHER: Final = 64
"""Parts whose frames are added up together: fewer group-bys, and few parts in memory."""


@dataclass(frozen=True)
class Part:
    """Contribution of some rows.

    Attributes:
        rows: number of rows that are attributed.
        left_out: number of rows without pi_old, see ``scored_rows.ScoredRows``.
        sums: of ``resample``, as ``decompose`` takes them.
        cells: by the buckets of all ``PROFILES``, see ``merge``.
        ages: number of rows with a token of each staleness.
        tokens, worst: the worst examples, see ``find_worst``, with rows numbered from the first.
        stale: whether a token is recorded as stale.
        sample: rows to look for causes in.
    """

    rows: int
    left_out: int
    sums: Mapping[str, Array]
    cells: pl.DataFrame
    ages: Counter[int]
    tokens: pl.DataFrame
    worst: pl.DataFrame
    stale: bool
    sample: Rows


def summarize_rows(rows: Rows, seed: tuple[int, ...], *, worst: int, left_out: int = 0) -> Part:
    """Summarize rows of one step; all of them are the sample.

    Args:
        rows: with log pi_old by the trainer's own weights.
        seed: of bootstrap draws.
        worst: tokens and rows to list.
        left_out: rows besides whose pi_old is not known.
    """
    cells, loss = sum_cells(rows)
    sums = {"recorded": place_cells(cells, len(rows)), **compute_routing_sums(rows)}
    worst_tokens, worst_rows = find_worst(rows, sums["recorded"], loss, worst)
    return Part(
        rows=len(rows),
        left_out=left_out,
        sums={name: resample(each, seed) for name, each in sums.items()},
        cells=merge(cells, *PROFILES),
        ages=count_by_age(cells, rows),
        tokens=worst_tokens,
        worst=worst_rows,
        stale=has_stale_tokens(rows),
        sample=rows,
    )


def join_parts(parts: Iterable[Part], worst: int) -> Part:
    """Add up parts of successive rows, the sums of one in memory at a time."""
    sums: dict[str, Array] = {}
    joined: list[Part] = []
    rows = 0
    for part in parts:
        sums |= {name: each + sums.get(name, 0.0) for name, each in part.sums.items()}
        later = pl.col("row") + rows
        moved = {name: getattr(part, name).with_columns(later) for name in ("tokens", "worst")}
        joined.append(replace(part, sums={}, **moved))
        rows += part.rows
        if len(joined) == _TOGETHER:
            joined = [_join_frames(joined, worst)]
    return replace(_join_frames(joined, worst), sums=sums)


def _join_frames(parts: list[Part], worst: int) -> Part:
    samples = [part.sample for part in parts if len(part.sample)]
    return Part(
        rows=sum(part.rows for part in parts),
        left_out=sum(part.left_out for part in parts),
        sums={},
        cells=merge(pl.concat([part.cells for part in parts]), *PROFILES),
        ages=sum((part.ages for part in parts), Counter()),
        tokens=merge_copies(pl.concat([part.tokens for part in parts]), worst),
        worst=merge_copies(pl.concat([part.worst for part in parts]), worst),
        stale=any(part.stale for part in parts),
        sample=concatenate(samples or [parts[0].sample]),
    )
