"""Recorded tokens, grouped for tests by prompt and by context, and their statistics within one context.

Rows of one prompt share their first tokens. If two rows were sampled from the same context, both policies'
distributions in this context are observed at several points, so that a constant difference can be distinguished from a
varying one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ....recording import Rows
from ..frames import ValidTokens, hash_ids, mix, select_valid_tokens

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

REPLICATES = 400


@dataclass(frozen=True)
class SampledTokens:
    """Valid tokens of a recording, with their prompt, context and age.

    Attributes:
        tokens: log-probs and positions, (n,) each.
        step: (n,) step of each token.
        staleness: (n,) staleness of each token, -1 if unknown.
        cluster: (n,) number of the cluster that is resampled as a whole: the rows of one prompt in one step.
        context: (n,) number of the context. A context consists of prompt, step, versions and all previous tokens, and
            therefore has one distribution.
        token_id: (n,).
        again: (n,) steps since the prompt of each token's row first occurred; 0 if the prompt is new, -1 if it was not
            recorded.
        turns: largest number of turns in a row.
    """

    tokens: ValidTokens
    step: Integers
    staleness: Integers
    cluster: Integers
    context: Integers
    token_id: Integers
    again: Integers
    turns: int

    def __len__(self) -> int:
        return len(self.step)

    def take(self, chosen: NDArray[np.bool_]) -> SampledTokens:
        """Return only these tokens."""
        columns = ("step", "staleness", "cluster", "context", "token_id", "again")
        return replace(self, tokens=self.tokens.take(chosen), **{name: getattr(self, name)[chosen] for name in columns})


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 98 % interval, computed by resampling prompts."""

    value: float
    low: float
    high: float


def collect_tokens(rows: Rows) -> SampledTokens:
    """Collect the valid tokens of ``rows`` and number their prompts and contexts."""
    tokens = select_valid_tokens(rows)
    group = _groups(rows)
    return SampledTokens(
        tokens=tokens,
        step=rows.step[tokens.row],
        staleness=rows.token_staleness[tokens.index],
        cluster=group[tokens.row],
        context=number(mix(group.astype(np.uint64)[tokens.row]) + (_prefixes(rows) + _newer(rows))[tokens.index]),
        token_id=rows.response_ids[tokens.index].astype(np.int64),
        again=_again(rows)[tokens.row],
        turns=int(tokens.turn.max(initial=-1)) + 1,
    )


def sum_by_cluster(columns: Iterable[NDArray[np.generic]], cluster: Integers) -> Array:
    """Sum k columns, (n,) each, over the tokens of each non-empty cluster: (clusters, k) float64."""
    there = np.bincount(cluster) > 0
    return np.stack([np.bincount(cluster, weights=column)[there] for column in columns], axis=-1)


def estimate(sums: Array, statistic: Callable[[Array], float], *, seed: int = 0) -> Estimate | None:
    """Estimate a statistic of sums over all tokens, with a cluster-bootstrap interval; None if it is not finite.

    Args:
        sums: (clusters, k), from ``sum_by_cluster``.
        statistic: computes the statistic from the k totals.
    """
    count = len(sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = statistic(sums.sum(0)) if count else np.nan
        if not np.isfinite(value):
            return None
        rng = np.random.default_rng(seed)
        # Drawing clusters with replacement is the same as drawing multinomial counts, and sums of columns need only
        # these counts.
        weights = rng.multinomial(count, np.full(count, 1.0 / count), size=REPLICATES)
        drawn = np.array([statistic(row) for row in weights @ sums])
    drawn = drawn[np.isfinite(drawn)]
    # If draws that are not finite were left out, the interval would have a selection bias.
    if len(drawn) < REPLICATES / 2:
        return None
    return Estimate(float(value), float(np.percentile(drawn, 1)), float(np.percentile(drawn, 99)))


def _groups(rows: Rows) -> Integers:
    """Number the prompts, (N,): by uid if known, else by the prompt's tokens, else as one prompt per row."""
    prompts = [
        str(uid) or (rows.prompt_ids[start:end].tobytes().hex() or f"row {index}")
        for index, (uid, start, end) in enumerate(
            zip(rows.uid, rows.prompt_offsets[:-1], rows.prompt_offsets[1:], strict=True)
        )
    ]
    keys = np.array(
        [
            f"{step}/{old}/{new}/{prompt}"
            for step, old, new, prompt in zip(rows.step, rows.oldest_version, rows.newest_version, prompts, strict=True)
        ]
    )
    return number(keys)


def _again(rows: Rows) -> Integers:
    """Compute the steps since a prompt with the same tokens first occurred, (N,); -1 if a row has no prompt."""
    first: dict[bytes, int] = {}
    ages = np.full(len(rows), -1, dtype=np.int64)
    for index in np.argsort(rows.step, kind="stable"):
        prompt = rows.prompt_ids[rows.prompt_offsets[index] : rows.prompt_offsets[index + 1]].tobytes()
        if prompt:
            step = int(rows.step[index])
            ages[index] = step - first.setdefault(prompt, step)
    return ages


def _prefixes(rows: Rows) -> NDArray[np.uint64]:
    """Hash, for each token, all response tokens before it in its row, (M,)."""
    return np.where(rows.position > 0, np.roll(hash_ids(rows.response_ids, rows.offsets), 1), np.uint64(0))


def _newer(rows: Rows) -> NDArray[np.uint64]:
    """Hash the version of each token sampled by newer weights than its row's first token, (M,); 0 for other tokens."""
    newer = (rows.version != np.repeat(rows.oldest_version, np.diff(rows.offsets))) & (rows.version >= 0)
    return np.where(newer, mix(rows.version.astype(np.uint64)), np.uint64(0))


def number(keys: NDArray[np.generic]) -> Integers:
    """Replace keys by consecutive integers."""
    _, numbers = np.unique(keys, return_inverse=True)
    return numbers.astype(np.int64)


@dataclass(frozen=True)
class Contexts:
    """Contexts from which at least two different tokens were sampled, with centred log-probs.

    Attributes:
        index: (n,) indices of their distinct tokens.
        context: (n,) number of the context, from 0.
        count: number of contexts.
        mu, old: (n,) log-probs without their context's mean.
    """

    index: Integers
    context: Integers
    count: int
    mu: Array
    old: Array


@dataclass(frozen=True)
class Support:
    """Sum of the probabilities of the distinct sampled tokens of every context.

    Attributes:
        mu, old: (contexts,) probability under each policy.
        cluster: (contexts,).
    """

    mu: Array
    old: Array
    cluster: Integers


def _find_distinct_tokens(sampled: SampledTokens) -> Integers:
    """Return the indices of the distinct tokens of each context, sorted by context."""
    # The keys are sorted by context, then by the 32-bit token, so that duplicates become neighbours.
    key = (sampled.context << 32) + sampled.token_id
    order = np.argsort(key, kind="stable")
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.diff(key[order]) != 0
    return order[first]


def center_within_contexts(sampled: SampledTokens) -> Contexts:
    """Center log-probs within each context that has at least two different tokens."""
    index = _find_distinct_tokens(sampled)
    _, place, kinds = np.unique(sampled.context[index], return_inverse=True, return_counts=True)
    index, place = index[kinds[place] > 1], place[kinds[place] > 1]
    _, place = np.unique(place, return_inverse=True)
    count = int(place.max(initial=-1)) + 1
    return Contexts(
        index=index,
        context=place,
        count=count,
        mu=_centred(sampled.tokens.mu[index], place, count),
        old=_centred(sampled.tokens.old[index], place, count),
    )


def sum_probabilities(sampled: SampledTokens) -> Support:
    """Sum the probabilities of the distinct sampled tokens of each context."""
    index = _find_distinct_tokens(sampled)
    _, place = np.unique(sampled.context[index], return_inverse=True)
    count = int(place.max(initial=-1)) + 1
    cluster = np.zeros(count, dtype=np.int64)
    cluster[place] = sampled.cluster[index]
    return Support(
        mu=np.bincount(place, weights=np.exp(sampled.tokens.mu[index]), minlength=count).astype(np.float64),
        old=np.bincount(place, weights=np.exp(sampled.tokens.old[index]), minlength=count).astype(np.float64),
        cluster=cluster,
    )


def _centred(values: Array, place: Integers, count: int) -> Array:
    """Subtract the mean of each context."""
    mean = np.bincount(place, weights=values, minlength=count) / np.maximum(np.bincount(place, minlength=count), 1)
    return values - mean[place]
