"""Statistics within one context: tokens that several rows sampled after the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .sampled_tokens import Array, Integers, SampledTokens


@dataclass(frozen=True)
class Contexts:
    """Contexts from which at least two different tokens were sampled, with centred log-probs.

    Attributes:
        index: of their tokens, one of each kind in a context, (n,).
        context: (n,) from 0.
        count: how many contexts.
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
    """Return indices of one token of each kind in each context, sorted by context."""
    # Sorted by context, then token of 32 bits: duplicates become neighbours.
    key = (sampled.context << 32) + sampled.token_id
    order = np.argsort(key, kind="stable")
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.diff(key[order]) != 0
    return order[first]


def center_within_contexts(sampled: SampledTokens) -> Contexts:
    """Center log-probs within each context that has two different tokens or more."""
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
