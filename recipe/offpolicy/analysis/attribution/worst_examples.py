"""Tokens and rows with the largest mismatch, with their context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...monitor.mismatch.sums import COLUMNS
from ...recording import Rows
from .profiles import Array, is_valid
from .token_text import TokenDecoder

BEFORE: Final = 12
AFTER: Final = 4
"""Tokens of context."""
EXCERPT: Final = 60
"""Tokens of a row that are shown."""
_BLOCK: Final = 64
"""Values of which the largest stands for all, in the search for the largest ones."""
_PROBED: Final = 16
"""Places at which rows of equal length are compared first."""


@dataclass(frozen=True)
class WorstToken:
    """A token in its context, with its k3 of log pi/mu.

    Attributes:
        position: in its response, from 0.
        count: rows of the same step that sampled this token after the same ids; the one with the largest k3 is shown.
        mu, old, pi: log-probs.
        share: of all of them together, of the sum of k3(log pi/mu) over all tokens.
        before, token, after: text, escaped; or ids.
    """

    step: int
    uid: str
    row: int
    position: int
    turn: int
    staleness: int
    count: int
    mu: float
    old: float
    pi: float
    share: float
    before: str
    token: str
    after: str

    @property
    def total(self) -> float:
        """log pi - log mu."""
        return self.pi - self.mu


@dataclass(frozen=True)
class WorstRow:
    """A row, with its mean k3 of log pi/mu.

    Attributes:
        length: valid tokens.
        count: rows of the same step with these ids, prompt and response; the one with the largest k3 is shown.
        k3: mean a token.
        log_ratio: sum of log pi/mu, nats.
        share: of all of them together, of the sum of k3 over all rows.
        text: its beginning, escaped; or ids.
    """

    step: int
    uid: str
    row: int
    length: int
    staleness: int
    count: int
    k3: float
    log_ratio: float
    share: float
    text: str


def find_worst_tokens(rows: Rows, loss: Array, reader: TokenDecoder, most: int) -> list[WorstToken]:
    """Find the ``most`` tokens with the largest k3, each context once; none where all log-probs agree.

    Args:
        loss: (M,) k3 of log pi/mu, 0 where a log-prob is not finite, and off the mask.
    """
    whole = loss.sum()
    shown: set[int] = set()
    worst: list[WorstToken] = []
    for index in iterate_largest(loss):
        if len(worst) == most or not loss[index] > 0:
            break
        if index in shown:
            continue
        row = int(np.searchsorted(rows.offsets, index, side="right")) - 1
        end = int(rows.offsets[row + 1])
        before = _before(rows, row, index)
        # Rows of one group share their first tokens: the same mismatch is listed once, with its count.
        siblings = _find_siblings(rows, row, index)
        shown.update(siblings.tolist())
        worst.append(
            WorstToken(
                step=int(rows.step[row]),
                uid=str(rows.uid[row]),
                row=row,
                position=index - int(rows.offsets[row]),
                turn=int(rows.turn[index]),
                staleness=int(rows.between(row, row + 1).token_staleness[index - int(rows.offsets[row])]),
                count=len(siblings),
                mu=float(rows.rollout_log_prob[index]),
                old=float(rows.old_log_prob[index]),
                pi=float(rows.log_prob[index]),
                share=float(loss[siblings].sum() / whole),
                before=reader.decode(before[-BEFORE:].tolist()),
                token=reader.decode([int(rows.response_ids[index])]),
                after=reader.decode(rows.response_ids[index + 1 : min(end, index + 1 + AFTER)].tolist()),
            )
        )
    return worst


def iterate_largest(values: NDArray[np.float64]) -> Iterator[int]:
    """Yield the indices of ``values``, the largest first and of equals the earlier, without sorting all of them."""
    blocks = -(-len(values) // _BLOCK)
    most = np.maximum.reduceat(values, np.arange(blocks) * _BLOCK) if blocks else values
    done, count = 0, _BLOCK
    while done < len(values):
        # As many values as blocks reach the least of these blocks' largest.
        least = np.partition(most, -count)[-count] if count < blocks else -np.inf
        found = np.flatnonzero(values >= least)
        found = found[np.argsort(-values[found], kind="stable")]
        yield from found[done:].tolist()
        done, count = len(found), count * _BLOCK


def _find_siblings(rows: Rows, row: int, index: int) -> NDArray[np.int64]:
    """Find the valid tokens of the same step that are the one at ``index`` of ``row``, after the same ids, and itself.

    Returns:
        Their indices.
    """
    place = index - rows.offsets[row]
    alike = (np.diff(rows.offsets) > place) & (rows.step == rows.step[row])
    if not len(rows.prompt_ids):  # unrecorded prompts are distinguished by uid
        alike &= rows.uid == rows.uid[row]
    there = _probe(rows, np.flatnonzero(alike), row, int(place) + 1)
    before = _before(rows, row, index)
    same = np.array(
        [rows.offsets[i] + place for i in there if np.array_equal(_before(rows, i, rows.offsets[i] + place), before)]
    )
    return same[is_valid(rows, same)]


def _probe(rows: Rows, there: NDArray[np.int64], row: int, length: int) -> NDArray[np.int64]:
    """Leave of the rows ``there``, of at least this length, those that are ``row`` at some of its first tokens."""
    # Few ids tell most rows apart.
    for place in range(length - 1, -1, -max(length // _PROBED, 1)):
        if len(there) == 1:
            break
        there = there[rows.response_ids[rows.offsets[there] + place] == rows.response_ids[rows.offsets[row] + place]]
    return there


def hash_context(rows: Rows, row: int, length: int | None = None) -> bytes:
    """Hash what tells a row from others of its step: its prompt, or uid where none is recorded, and its response.

    Args:
        length: of the response's beginning that counts; None: all of it.
    """
    start, end = rows.offsets[row], rows.offsets[row + 1]
    prompt = rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]]
    response = rows.response_ids[start : end if length is None else start + length]
    named = (str(rows.step[row]), "" if len(rows.prompt_ids) else str(rows.uid[row]), str(len(prompt)))
    state = blake2b("\0".join(named).encode(), digest_size=16)
    for ids in (prompt, response):
        state.update(np.ascontiguousarray(ids).data)
    return state.digest()


def _before(rows: Rows, row: int, index: int) -> NDArray[np.int32]:
    """Return the ids of the prompt and of the response up to the token at ``index``."""
    prompt = rows.prompt_ids[rows.prompt_offsets[row] : rows.prompt_offsets[row + 1]]
    return np.concatenate([prompt, rows.response_ids[rows.offsets[row] : index]])


def find_worst_rows(rows: Rows, sums: Array, reader: TokenDecoder, most: int) -> list[WorstRow]:
    """Find the ``most`` rows with the largest mean k3, each text once; none where all log-probs agree.

    Args:
        sums: (N, *SHAPE), of ``compute_row_sums``.
    """
    count, total, log_ratio = (sums[..., COLUMNS.index(name)].sum((1, 2)) for name in ("tokens", "total_k3", "total"))
    mean = np.divide(total, count, out=np.zeros(len(rows)), where=count > 0)
    shown: set[int] = set()
    worst: list[WorstRow] = []
    for row in iterate_largest(mean):
        if len(worst) == most or not mean[row] > 0:
            break
        if row in shown:
            continue
        same = _find_copies(rows, row, mean > 0)
        shown.update(same)
        worst.append(
            WorstRow(
                step=int(rows.step[row]),
                uid=str(rows.uid[row]),
                row=row,
                length=int(count[row]),
                staleness=int(rows.staleness[row]),
                count=len(same),
                k3=float(mean[row]),
                log_ratio=float(log_ratio[row]),
                share=float(total[same].sum() / total.sum()),
                text=reader.decode(rows.response_ids[rows.offsets[row] : rows.offsets[row + 1]][:EXCERPT].tolist()),
            )
        )
    return worst


def _find_copies(rows: Rows, row: int, among: NDArray[np.bool_]) -> list[int]:
    """Find the rows of the same step with the same prompt and ids; the uid stands in for an unrecorded prompt.

    Args:
        among: (N,), rows to look at.
    """
    alike = among & (rows.step == rows.step[row])
    if not len(rows.prompt_ids):
        alike &= rows.uid == rows.uid[row]
    for offsets in (rows.offsets, rows.prompt_offsets):
        lengths = np.diff(offsets)
        alike &= lengths == lengths[row]
    there = _probe(rows, np.flatnonzero(alike), row, int(np.diff(rows.offsets)[row]))
    end = int(rows.offsets[row + 1])
    return [
        int(i) for i in there if np.array_equal(_before(rows, i, int(rows.offsets[i + 1])), _before(rows, row, end))
    ]
