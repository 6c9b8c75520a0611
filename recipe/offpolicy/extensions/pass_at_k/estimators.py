"""Estimators of pass@k, the probability that at least one of k independent samples is right, from n with c right."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass


def unbiased(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from n samples with c right, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    n must be fixed before sampling; if the results can end sampling early, ``unbiased_dynamic`` is unbiased.

    Raises:
        ValueError: k > n, c > n, n < 1, or a number that is not a count.

    Example:
        >>> unbiased(4, 1, 4), unbiased(4, 1, 2)
        (1.0, 0.5)
    """
    n, c, k = _counts(n, c, k)
    if k > n:
        raise ValueError(f"pass@{k} of {n} samples: k must be at most n.")
    all_subsets = math.comb(n, k)
    return (all_subsets - math.comb(n - c, k)) / all_subsets


def unbiased_dynamic(looks: Sequence[int], n: int, c: int, k: int, *, successes: int) -> float:
    """Unbiased estimate of pass@k if sampling ends at the first look with enough successes.

    (1 - p)^k is estimated by the share of possible sample orders that begin with k failures: paths from k failures to
    (n, c), over paths from the start, avoiding all points at which sampling would have ended. The estimate of
    ``unbiased`` is too large in this case. k may be larger than n.

    Args:
        looks: cumulative numbers of samples after which the results are checked, such as 8, 16, 32.
        n, c: samples and successes of a prompt at the look at which it ended.
        k: at most the last look.
        successes: sampling ends at the first look with this many, or at the last look.

    Raises:
        ValueError: k > the last look, c > n, n is not a look, or sampling does not end at or cannot reach this point.

    Example:
        >>> round(unbiased_dynamic([8, 16], 8, 1, 8, successes=1), 3), unbiased_dynamic([8, 16], 16, 0, 8, successes=1)
        (1.0, 0.0)
    """
    n, c, k = _counts(n, c, k)
    at = tuple(read_count(look, "a look") for look in looks)
    successes = read_count(successes, "successes")
    if not at or at[0] < 1 or any(later <= sooner for sooner, later in itertools.pairwise(at)):
        raise ValueError(f"looks={list(at)}: expected increasing counts of samples, from 1 on.")
    if successes < 1:
        raise ValueError(f"successes={successes}: expected 1 or more.")
    if k > at[-1]:
        raise ValueError(f"pass@{k} with a last look at {at[-1]} samples: k must be at most that.")
    if n not in at:
        raise ValueError(f"{n} samples: sampling ends at one of {list(at)}.")
    if n < at[-1] and c < successes:
        raise ValueError(f"{c} right of {n} samples: sampling continues until {successes} are right.")
    paths = _count_paths(at, successes, 0).get((n, c), 0)
    if paths == 0:
        raise ValueError(f"{c} right of {n} samples: with {successes} right it would have ended at an earlier look.")
    return (paths - _count_paths(at, successes, k).get((n, c), 0)) / paths


@functools.lru_cache(maxsize=256)
def _count_paths(looks: tuple[int, ...], successes: int, failures: int) -> dict[tuple[int, int], int]:
    """Count the sample orders that end at each (n, c), for those that begin with this many failures."""
    open_paths, before = {0: 1}, 0
    ended: dict[tuple[int, int], int] = {}
    for look in looks:
        free = look - before - max(0, min(failures, look) - before)
        reached: dict[int, int] = {}
        for count, paths in open_paths.items():
            for more in range(free + 1):
                reached[count + more] = reached.get(count + more, 0) + paths * math.comb(free, more)
        last = look == looks[-1]
        ended |= {(look, count): paths for count, paths in reached.items() if last or count >= successes}
        open_paths = {count: paths for count, paths in reached.items() if not last and count < successes}
        before = look
    return ended


@dataclass(frozen=True, order=True)
class RankingOnly:
    """A number that only ranks prompts or checkpoints and estimates nothing: it has no arithmetic, and no float."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:.3f}"


def rank(n: int, c: int, k: int) -> RankingOnly:
    """Compute 1 - (1 - c/n)^k, pass@k if c/n were the prompt's own rate; biased low, and suitable only for ranking.

    Raises:
        ValueError: as ``unbiased``, but k may be larger than n.
    """
    n, c, k = _counts(n, c, k)
    return RankingOnly(1.0 - (1.0 - c / n) ** k)


def _counts(n: int, c: int, k: int) -> tuple[int, int, int]:
    n, c, k = read_count(n, "n"), read_count(c, "c"), read_count(k, "k")
    if n < 1 or k < 1 or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {n} samples with {c} right: expected n >= 1, k >= 1 and 0 <= c <= n.")
    return n, c, k


def read_count(value: int, name: str) -> int:
    """Read a whole number of any integer type.

    Raises:
        ValueError: it is not a whole number; the message has its name.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name}={value}: not a count.")
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name}={value}: not a count.") from error
