"""Checks a row's recorded versions against the step in which its prompt was issued, and against its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from ..batch.token_versions import CHUNKS, UNKNOWN, Chunk
from ..batch.weight_versions import read_extra_fields
from .ages import RowTag, StalenessError

RESPONSE_MASK = "response_mask"
"""Column for runs of tokens; turns come from ``EXTRA_FIELDS``."""


Turns = Sequence[Sequence[Chunk]]
"""The chunks of each request of one row."""


def list_turns(data: TensorDict) -> list[Turns | None]:
    """List the turns of each row; None for a row without recorded turns."""
    return [fields.get(CHUNKS) for fields in read_extra_fields(data)]


def need_runs(rows: Sequence[RowTag], turns: Sequence[Turns | None]) -> bool:
    """Return True if the response mask is needed to detect a lost chunk.

    A response has at most as many sampled tokens as tokens: if one turn is that long, each token has a version.
    """
    return any(
        noted is not None and not (len(noted) == 1 and sum(tokens for _, tokens in noted[0]) >= row.length)
        for row, noted in zip(rows, turns, strict=True)
        if not row.is_padding
    )


def check_noted(
    rows: Sequence[RowTag], turns: Sequence[Turns | None], runs: Sequence[Sequence[int]] | None, step: int, eta: str
) -> None:
    """Check that each token has a version, and none an older one than was in force when its prompt was issued.

    A prompt issued in step s, or restored from a checkpoint, is sampled by version s - 1 or newer.

    Args:
        turns: turns of each row.
        runs: lengths of the runs of each row's response mask; None if ``need_runs`` is False.

    Raises:
        StalenessError: a client lost a chunk, or a rollout server reports an older version than it samples with.
    """
    for row, noted, lengths in zip(rows, turns, runs or [[]] * len(rows), strict=True):
        if row.is_padding:
            continue
        if noted is not None and (lost := count_lost(noted, lengths)):
            raise StalenessError(
                f"sequence {row.key} of step {step} has {row.length} tokens, but the version of the weights that "
                f"sampled {lost} of them was not recorded (offpolicy.staleness.eta={eta}, chunks "
                f"{[list(turn) for turn in noted]}): the client of the rollout servers has lost a chunk, or the "
                f"agent loop puts answers to several requests into one turn. Fix: use one request id per sequence in "
                f"the agent loop, or set offpolicy.staleness.eta=null."
            )
        oldest = min([version for turn in noted or () for version, _ in turn], default=row.version)
        if oldest < row.issued - 1:
            raise StalenessError(
                f"sequence {row.key} of step {step} reports that version {oldest} of the weights sampled it, but its "
                f"prompt was issued in step {row.issued}, under version {row.issued - 1} "
                f"(offpolicy.staleness.eta={eta}): its rollout server reports another version than it samples "
                f"with, or has not loaded these weights."
            )


def count_versions(turns: Turns) -> int:
    """Count the versions that sampled a row.

    Example:
        >>> count_versions([[(3, 2), (4, 5)], [(4, 1), (6, 1)]])
        3
    """
    return len({version for turn in turns for version, _ in turn})


def count_lost(turns: Turns, runs: Sequence[int]) -> int:
    """Count the tokens of a row without a recorded version.

    Runs may be shorter than their turns if verl has truncated them. If there are fewer turns than runs, the agent loop
    uses a new request id per turn; such rows cannot be assigned, and none of their tokens counts as lost.

    Example:
        >>> count_lost([[(3, 2), (4, 5)]], [7]), count_lost([[(3, 2)]], [7]), count_lost([[(3, 2)]], [2, 5])
        (0, 5, 0)
    """
    unknown = sum(tokens for turn in turns for version, tokens in turn if version == UNKNOWN)
    if unknown or len(turns) != len(runs):
        return unknown
    named = (sum(tokens for _, tokens in turn) for turn in turns)
    return sum(max(run - tokens, 0) for run, tokens in zip(runs, named, strict=True))


def list_runs(response_mask: Tensor) -> list[list[int]]:
    """List the lengths of the runs of each row's mask, (B, T) or nested by row.

    Example:
        >>> list_runs(torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]]))
        [[2, 1], []]
    """
    rows = response_mask.unbind()
    # A 0 after each row separates its last run from the next row's first.
    flat = torch.cat([torch.cat([row.bool(), row.new_zeros(1, dtype=torch.bool)]) for row in rows])
    before = torch.cat([flat.new_zeros(1), flat[:-1]])
    starts, ends = (flat & ~before).nonzero()[:, 0], (before & ~flat).nonzero()[:, 0]
    bounds = torch.tensor([len(row) + 1 for row in rows]).cumsum(0)
    counts = torch.bincount(torch.searchsorted(bounds, starts, right=True), minlength=len(rows)).tolist()
    return [part.tolist() for part in (ends - starts).split(counts)]
