"""Random choice of the rows whose micro-batches are proved in an update; the trainer draws them for all ranks."""

from __future__ import annotations

import random

import torch
from torch import Tensor

PROVE_EVERY = "offpolicy.prove_every"
"""Key of the number of updates between two proofs."""
ENOUGH = 256
"""Minimum number of response tokens to distinguish copied or shifted log-probs from a coincidence."""


def draw_rows(tokens: Tensor, ranks: int, *, seed: str, first: bool) -> Tensor:
    """Draw rows of an update: (B,) int64, 1 for a drawn row, 2 for a drawn row whose micro-batch also runs trials.

    Args:
        tokens: (B,) number of response tokens of each row; the rows of each rank are contiguous.
        seed: seed of the draw.
        first: if True, draw the first, the last, the longest and a random row of each rank, and more rows until the
            drawn rows have ``ENOUGH`` tokens; if False, draw one random row of each rank. Rows without response tokens
            are skipped if the rank has other rows. Trials run in the micro-batch of the longest drawn row.

    Example:
        >>> draw_rows(torch.tensor([3, 0, 9]), 1, seed="1", first=True).tolist()
        [1, 0, 2]
    """
    lengths = tokens.long().tolist()
    drawn = torch.zeros(len(lengths), dtype=torch.int64)
    for rank in range(ranks):
        share = range(rank * len(lengths) // ranks, (rank + 1) * len(lengths) // ranks)
        rows = [row for row in share if lengths[row]] or list(share)
        if not rows:
            continue
        order = random.Random(f"{seed} {rank}").sample(rows, len(rows))
        chosen = set(order[:1])
        if first:
            chosen |= {rows[0], rows[-1], max(rows, key=lengths.__getitem__)}
            for row in order[1:]:
                if sum(lengths[each] for each in chosen) >= ENOUGH:
                    break
                chosen.add(row)
        drawn[sorted(chosen)] = 1
        drawn[max(chosen, key=lengths.__getitem__)] = 2
    return drawn
