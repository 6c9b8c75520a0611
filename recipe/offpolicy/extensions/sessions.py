"""Rollouts of a batch, one entry per session: an agent loop may return several rows; the last one's score counts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch.rewards import check_rewards
from .batch_view import BatchView


@dataclass(frozen=True)
class Sessions:
    """The S sessions of one batch.

    Attributes:
        of_row: (n,) int64, the session of each row.
        last: (S,) its last row.
        uids: (S,) its group.
        scores: (S,) float64, the raw score of its last row.
        tokens: (S,) float64, response tokens of all its rows, without tool tokens.
        truncated: (S,) bool, its last row has the maximum response length.
        silent: (S,) bool, rejected with ``baseline=exclude``, or without remaining siblings.
    """

    of_row: Tensor
    last: Tensor
    uids: Sequence[str]
    scores: Tensor
    tokens: Tensor
    truncated: Tensor
    silent: Tensor

    def find_right(self, at_least: float) -> Tensor:
        """Find the sessions whose score is at least ``at_least``, (S,) bool."""
        return self.scores >= round_threshold(at_least)

    def groups(self) -> dict[str, list[int]]:
        """Collect the sessions of each group, without silent ones."""
        found: dict[str, list[int]] = {}
        for session, (uid, silent) in enumerate(zip(self.uids, self.silent.tolist(), strict=True)):
            if not silent:
                found.setdefault(uid, []).append(session)
        return found


def read_sessions(batch: BatchView, most_tokens: int | None = None) -> Sessions:
    """Read the sessions of a batch.

    Args:
        most_tokens: longest response, tool tokens included; None: nothing counts as truncated.

    Raises:
        RewardError: a row's score is not finite.
    """
    check_rewards(batch.scores, batch.uids, f"step {batch.step}")
    columns = batch.rows("response_mask", "responses")
    mask = columns["response_mask"].bool()
    names = list(batch.sessions)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of_row = torch.tensor([numbers[name] for name in names], dtype=torch.int64)
    last = torch.zeros(len(numbers), dtype=torch.int64)
    last[of_row] = torch.arange(len(names))
    tokens = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, of_row, mask.sum(-1).double())
    silent = torch.zeros(len(names), dtype=torch.bool) if batch.silent is None else batch.silent.bool()
    ends = torch.tensor([len(response) for _, response in batch.token_ids]) if most_tokens else None
    uids = list(batch.uids)
    return Sessions(
        of_row=of_row,
        last=last,
        uids=[uids[row] for row in last.tolist()],
        scores=batch.scores.sum(-1)[last].double(),
        tokens=tokens,
        truncated=torch.zeros(len(numbers), dtype=torch.bool) if ends is None else ends[last] >= (most_tokens or 0),
        silent=silent[last],
    )


def round_threshold(at_least: float) -> float:
    """Round a threshold so that a score of the same value in float32 reaches it: 0.9 becomes 0.89999998.

    Example:
        >>> round_threshold(1.0), round_threshold(0.9) < 0.9
        (1.0, True)
    """
    return min(at_least, float(torch.tensor(at_least, dtype=torch.float32)))


def identify_prompts(batch: BatchView, sessions: Sessions) -> list[str]:
    """Compute an identity of each session's prompt that is stable over steps, because verl draws a new uid at each.

    It is a hash of the prompt's token ids, of the session's first row.
    """
    first = {number: row for row, number in reversed(list(enumerate(sessions.of_row.tolist())))}
    ids = batch.token_ids
    return [
        hashlib.blake2b(",".join(map(str, ids[first[number]][0])).encode(), digest_size=16).hexdigest()
        for number in range(len(sessions.last))
    ]
