"""Rows whose micro-batches are proved at one update, drawn by the trainer for all ranks."""

from __future__ import annotations

import random

import torch
from torch import Tensor

PROVE_EVERY = "offpolicy.prove_every"
"""Key of the updates from one proof to the next."""
ENOUGH = 256
"""Response tokens by which copied or shifted log-probs are told from an accident."""


def draw_rows(tokens: Tensor, ranks: int, *, seed: str, first: bool) -> Tensor:
    """Draw rows of an update: (B,) int64, 1 for a row that was drawn, and 2 where trials are due as well.

    Args:
        tokens: (B,) response tokens of each row, in the order in which each of ``ranks`` takes a contiguous share.
        seed: the same draw for the same seed.
        first: draw the first, the last and the longest row of each rank and one at random, and further ones until they
            have ``ENOUGH`` tokens; else one at random. Of rows with a response token, where a rank has any.
            Trials are due in the micro-batch of the longest of them.

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
