"""The rows and tokens of a recording that are attributed, and the contexts in which these tokens were sampled.

Rows of one prompt share their first tokens. If two rows were sampled from the same context, both policies'
distributions in this context are observed at several points, so that a constant difference can be distinguished from a
varying one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, Self
from zlib import crc32

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ...monitor.mismatch_shares import EDGES
from ...recording import Rows, Step, concatenate
from ...recording.recording import find_scored_rows, get_trainers_pi_old

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

STEPS: Final = 64
"""Largest number of steps in a sample that does not contain all rows; these steps are evenly spread."""
BYTES_A_TOKEN: Final = 12
"""Compressed size of a token in a recorded file, in bytes. Of its nine columns, the log-probs hardly compress."""


@dataclass(frozen=True)
class RowSample:
    """Selection of the rows to read from a recording.

    Attributes:
        steps: steps from which rows are taken; None to take all rows of all steps.
        tokens: largest number of tokens from each step; at least one prompt is taken.
    """

    steps: frozenset[int] | None = None
    tokens: int = 0

    @classmethod
    def of_steps(cls, steps: Sequence[int], tokens: int) -> RowSample:
        """Choose at most ``STEPS`` of the steps, evenly spread, with ``tokens`` tokens in total."""
        places = np.linspace(0, len(steps) - 1, min(len(steps), STEPS)).round().astype(int)
        chosen = frozenset(steps[place] for place in places)
        return cls(chosen, tokens // max(len(chosen), 1))

    def take(self, rows: Rows, *, spare: bool = False) -> Rows:
        """Take rows of one step: all rows of certain prompts, where the set of prompts is the same in every step.

        Args:
            spare: whether to take one more prompt. Then a second selection, from the rows selected in each piece of a
                    step, yields the same rows as a selection from the whole step.
        """
        if self.steps is None or not len(rows):
            return rows
        if int(rows.step[0]) not in self.steps:
            return rows.take([])
        bounds = zip(rows.prompt_offsets[:-1], rows.prompt_offsets[1:], rows.uid, strict=True)
        # Prompts are chosen by their hash, so every step uses the same prompts without any state between steps.
        drawn = np.array([crc32(rows.prompt_ids[a:b].tobytes() or str(uid).encode()) for a, b, uid in bounds])
        _, of_row = np.unique(drawn, return_inverse=True)
        ends = np.cumsum(np.bincount(of_row, weights=np.diff(rows.offsets)))
        return rows.take(np.flatnonzero(of_row < max(int((ends <= self.tokens).sum()) + spare, 1)))


def select_scored_rows(parts: Iterable[Step]) -> tuple[Rows, int]:
    """Select the rows of all ``parts`` whose log pi_old under the trainer's own weights is known.

    Returns:
        The rows, with this value as their ``old_log_prob``, and the number of other rows, which belong to later
        gradient steps. If there are any such rows, the effect of the updates is not identified.

    Raises:
        ValueError: there is no part.
    """
    rows, left_out = [], 0
    for part in parts:
        known = find_scored_rows(part)
        scored = replace(part.rows, old_log_prob=get_trainers_pi_old(part))
        rows.append(scored if known.all() else scored.take(np.flatnonzero(known)))
        left_out += int((~known).sum())
    return concatenate(rows), left_out


def describe_left_out(left_out: int) -> str:
    """Describe the rows that are excluded from an attribution; empty if there are none."""
    reason = "drift is not identified. Record with correction.proximal=recompute to include them."
    return f"{left_out} rows of later gradient steps are excluded, and {reason}" if left_out else ""


def describe_none_scored(left_out: int) -> str:
    """Explain why nothing can be attributed if all rows are excluded, and suggest a fix, without a final full stop."""
    reason = "no row belongs to the first gradient step of a training step. Record with correction.proximal=recompute"
    return f"{left_out} rows are recorded, but {reason}"


@dataclass(frozen=True)
class ValidTokens:
    """The valid tokens of rows, that is, those with finite log-probs, concatenated: (n,) each.

    Attributes:
        row, place: number of the row, and the token's position in the response, from 0.
        mu, old, pi: log-probs, float64.
        turn: number of the model's turn.
        index: index of the token in the rows' own columns.
    """

    row: Integers
    place: Integers
    mu: Array
    old: Array
    pi: Array
    turn: Integers
    index: Integers

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: NDArray[np.bool_]) -> Self:
        """Return only these tokens."""
        return type(self)(**{each.name: getattr(self, each.name)[chosen] for each in fields(self)})

    @cached_property
    def gap(self) -> Array:
        """log pi_old - log mu."""
        return self.old - self.mu

    @cached_property
    def k3(self) -> Array:
        """k3 of the gap, whose mean estimates KL(mu, pi_old)."""
        return compute_k3(self.gap)

    @cached_property
    def probability(self) -> Integers:
        """Index into ``BINS`` of the probability under mu."""
        found = np.zeros(self.mu.shape, dtype=np.int8)
        # np.digitize gives the same result but takes several times as long.
        for edge in EDGES:
            found += self.mu >= edge
        return found.astype(np.int64)


def select_valid_tokens(rows: Rows) -> ValidTokens:
    """Select the response tokens whose three log-probs are finite."""
    columns = (rows.rollout_log_prob, rows.old_log_prob, rows.log_prob)
    index = np.flatnonzero(np.logical_and.reduce([rows.response_mask, *map(np.isfinite, columns)]))
    # Usually, all tokens are valid, and a slice avoids a copy.
    chosen = index if len(index) < rows.tokens else slice(None)
    mu, old, pi = (column[chosen].astype(np.float64) for column in columns)
    turn = rows.turn[chosen].astype(np.int64)
    return ValidTokens(rows.row_of_token[chosen], rows.position[chosen], mu, old, pi, turn, index)


def compute_k3(log_ratio: Array) -> Array:
    """Compute exp(x) - 1 - x; inside the exponential, x is clamped to +-20 (Schulman 2020)."""
    return np.expm1(np.clip(log_ratio, -20.0, 20.0)) - log_ratio


def hash_ids(ids: NDArray[np.int32], offsets: Integers) -> NDArray[np.uint64]:
    """Hash, for each token, the ids of its row up to this token, inclusive: (M,) modulo 2^64."""
    # The position is hashed too, so that order matters; one running sum then yields the hashes of all prefixes.
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    words = mix(ids.astype(np.uint64) * np.uint64(1 << 32) + (np.arange(len(ids)) - starts).astype(np.uint64))
    ends = np.cumsum(words, dtype=np.uint64)
    return ends - np.concatenate([np.zeros(1, np.uint64), ends])[starts]


def hash_prompts(rows: Rows) -> NDArray[np.uint64]:
    """Hash the prompt of each row, (N,), or its uid if no prompt was recorded."""
    if not len(rows.prompt_ids):
        return pl.Series(map(str, rows.uid), dtype=pl.String).hash().to_numpy()
    whole = np.append(hash_ids(rows.prompt_ids, rows.prompt_offsets), np.uint64(0))
    return mix(np.where(np.diff(rows.prompt_offsets) > 0, whole[rows.prompt_offsets[1:] - 1], np.uint64(0)))


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014), elementwise, modulo 2^64."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class SampledTokens(ValidTokens):
    """Valid tokens of a recording, with their prompt, context and age: (n,) each.

    Attributes:
        step: step of each token.
        staleness: staleness of each token, -1 if unknown.
        cluster: number of the cluster that is resampled as a whole: the rows of one prompt in one step.
        context: number of the context. A context consists of prompt, step, versions and all previous tokens, and
            therefore has one distribution.
        token_id: id of each token.
        again: steps since the prompt of each token's row first occurred; 0 if the prompt is new, -1 if it was not
            recorded.
    """

    step: Integers
    staleness: Integers
    cluster: Integers
    context: Integers
    token_id: Integers
    again: Integers


def collect_tokens(rows: Rows) -> SampledTokens:
    """Collect the valid tokens of ``rows`` and number their prompts and contexts."""
    tokens = select_valid_tokens(rows)
    row, index = tokens.row, tokens.index
    group = _number_prompts(rows)
    # A context is hashed from its prompt, the response tokens before it, and the version of a token that was sampled by
    # newer weights than its row's first token.
    before = np.where(rows.position > 0, np.roll(hash_ids(rows.response_ids, rows.offsets), 1), np.uint64(0))
    newer = (rows.version != np.repeat(rows.oldest_version, np.diff(rows.offsets))) & (rows.version >= 0)
    before += np.where(newer, mix(rows.version.astype(np.uint64)), np.uint64(0))
    return SampledTokens(
        **vars(tokens),
        step=rows.step[row],
        staleness=rows.token_staleness[index],
        cluster=group[row],
        context=number(mix(group.astype(np.uint64)[row]) + before[index]),
        token_id=rows.response_ids[index].astype(np.int64),
        again=_count_steps_since_new(rows)[row],
    )


def _number_prompts(rows: Rows) -> Integers:
    """Number the prompts, (N,): by uid if known, else by the prompt's tokens, else as one prompt per row."""
    prompts = [
        str(uid) or rows.prompt_ids[start:end].tobytes().hex() or f"row {index}"
        for index, (uid, start, end) in enumerate(
            zip(rows.uid, rows.prompt_offsets[:-1], rows.prompt_offsets[1:], strict=True)
        )
    ]
    columns = zip(rows.step, rows.oldest_version, rows.newest_version, prompts, strict=True)
    return number(np.array([f"{step}/{old}/{new}/{prompt}" for step, old, new, prompt in columns]))


def _count_steps_since_new(rows: Rows) -> Integers:
    """Count the steps since a prompt with the same tokens first occurred, (N,); -1 if a row has no prompt."""
    first: dict[bytes, int] = {}
    ages = np.full(len(rows), -1, dtype=np.int64)
    for index in np.argsort(rows.step, kind="stable"):
        prompt = rows.prompt_ids[rows.prompt_offsets[index] : rows.prompt_offsets[index + 1]].tobytes()
        if prompt:
            step = int(rows.step[index])
            ages[index] = step - first.setdefault(prompt, step)
    return ages


def number(keys: NDArray[np.generic]) -> Integers:
    """Replace keys with consecutive integers."""
    return np.unique(keys, return_inverse=True)[1].astype(np.int64)


def center_within_contexts(sampled: SampledTokens) -> tuple[int, Integers, Array, Array]:
    """Center log-probs within each context from which at least two different tokens were sampled.

    Returns:
        The number of these contexts, and, for each of their n distinct tokens, its index, and log mu and log pi_old
        without their context's mean.
    """
    index = _find_distinct_tokens(sampled)
    _, place, kinds = np.unique(sampled.context[index], return_inverse=True, return_counts=True)
    index, place = index[kinds[place] > 1], number(place[kinds[place] > 1])
    size = np.bincount(place)
    mu, old = (
        values[index] - (np.bincount(place, weights=values[index]) / size)[place]
        for values in (sampled.mu, sampled.old)
    )
    return len(size), index, mu, old


def sum_probabilities(sampled: SampledTokens) -> tuple[Array, Array, Integers]:
    """Sum the probabilities of the distinct sampled tokens of each context.

    Returns:
        For each context, the sum under mu, the sum under pi_old, and the cluster: (contexts,) each.
    """
    index = _find_distinct_tokens(sampled)
    _, first, place = np.unique(sampled.context[index], return_index=True, return_inverse=True)
    mu, old = (
        np.bincount(place, weights=np.exp(values[index])).astype(np.float64) for values in (sampled.mu, sampled.old)
    )
    return mu, old, sampled.cluster[index[first]]


def _find_distinct_tokens(sampled: SampledTokens) -> Integers:
    """Return the indices of the distinct tokens of each context, sorted by context."""
    return np.unique((sampled.context << 32) + sampled.token_id, return_index=True)[1]
