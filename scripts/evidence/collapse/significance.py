"""Exact tests of paired differences over seeds, and effect sizes; numpy alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

DRAWS = 10_000


def sign_flip(differences: ArrayLike, *, two_sided: bool = True) -> float:
    """Compute the p value of the exact paired sign-flip test: the share of sign patterns with a mean as large.

    One-sided, large means are those above 0. With n pairs no p is below 2 / 2^n, or 1 / 2^n one-sided.
    """
    found = np.asarray(differences, dtype=float)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(found))))
    means, own = signs @ found / len(found), found.mean()
    if two_sided:
        means, own = np.abs(means), abs(own)
    # Patterns that tie with the observed one count, whatever the order of the sum made of them.
    return float((means >= own - 1e-12).mean())


def equivalence(differences: ArrayLike, margin: float) -> float:
    """Compute the p value of equivalence within ``margin``: the larger of two one-sided sign-flip tests."""
    found = np.asarray(differences, dtype=float)
    return max(sign_flip(found + margin, two_sided=False), sign_flip(margin - found, two_sided=False))


def bootstrap(differences: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the mean, over ``DRAWS`` draws of seeds."""
    found = np.asarray(differences, dtype=float)
    drawn = found[np.random.default_rng(0).integers(len(found), size=(DRAWS, len(found)))].mean(1)
    edge = 50 * (1 - confidence)
    low, high = np.percentile(drawn, [edge, 100 - edge])
    return float(low), float(high)


def cliffs_delta(one: ArrayLike, other: ArrayLike) -> float:
    """Compute Cliff's delta: the share of pairs in which ``one`` is larger less that in which it is smaller."""
    signs = np.sign(np.subtract.outer(np.asarray(one), np.asarray(other)))
    return float(signs.mean())


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust p values by Holm's step-down rule (Holm 1979): each times how many are not smaller, and monotone."""
    adjusted, largest = {}, 0.0
    ordered = sorted(p_values, key=p_values.__getitem__)
    for place, name in enumerate(ordered):
        largest = max(largest, min(1.0, p_values[name] * (len(ordered) - place)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def page(scores: ArrayLike) -> float:
    """Compute the p value of a falling trend: Page's L (Page 1963) against ``DRAWS`` permutations within seeds.

    Args:
        scores: (seeds, levels), of which outcomes are expected to fall with the level.
    """
    found = np.asarray(scores, dtype=float)
    levels = np.arange(found.shape[1], 0, -1)
    ranks = np.array([_rank(row) for row in found])
    own = (ranks * levels).sum()
    shuffled = np.random.default_rng(0).permuted(np.broadcast_to(ranks, (DRAWS, *ranks.shape)), axis=2)
    return float((1 + ((shuffled * levels).sum((1, 2)) >= own - 1e-9).sum()) / (DRAWS + 1))


def _rank(row: np.ndarray) -> np.ndarray:
    """Rank from 1 on; ties get the mean of their ranks."""
    less, equal = (row[:, None] > row).sum(1), (row[:, None] == row).sum(1)
    ranks: np.ndarray = less + (equal + 1) / 2
    return ranks
