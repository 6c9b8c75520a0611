"""Estimators of pass@k, and advantages of one group that yield the gradient of pass@k.

A prompt has N samples, c of which are correct; rho(n, c, k) = 1 - C(n - c, k) / C(n, k).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor


def unbiased(n: int, c: int, k: int) -> float:
    """Estimate pass@k without bias from c correct of n samples, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    n must be fixed before sampling. If sampling may end early because of the results, use ``unbiased_dynamic``.

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
    """Estimate pass@k without bias if sampling ends at the first look with enough successes.

    (1 - p)^k is estimated by the share of possible sample orders that begin with k failures. This is the number of
    paths from k failures to (n, c), divided by the number of paths from the start. The paths avoid all points at which
    sampling would have ended. In this case, ``unbiased`` overestimates. k may be larger than n.

    Args:
        looks: cumulative numbers of samples after which the results are checked, such as 8, 16, 32.
        n, c: samples and successes of a prompt at the look at which sampling ended.
        k: at most the last look.
        successes: sampling ends at the first look with this many successes, or at the last look.

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
        raise ValueError(f"pass@{k} with a last look at {at[-1]} samples: k must be at most the last look.")
    if n not in at:
        raise ValueError(f"{n} samples: sampling ends at one of {list(at)}.")
    if n < at[-1] and c < successes:
        raise ValueError(f"{c} of {n} samples are correct: sampling continues until {successes} are correct.")
    paths = _count_paths(at, successes, 0).get((n, c), 0)
    if paths == 0:
        raise ValueError(
            f"{c} of {n} samples are correct: with {successes} correct, sampling would have ended at an earlier look."
        )
    return (paths - _count_paths(at, successes, k).get((n, c), 0)) / paths


@functools.lru_cache(maxsize=256)
def _count_paths(looks: tuple[int, ...], successes: int, failures: int) -> dict[tuple[int, int], int]:
    """Count, for each final (n, c), the sample orders that begin with this many failures and end there."""
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
    """A number that only ranks prompts or checkpoints; it estimates nothing, so arithmetic on it is not possible."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:.3f}"


def rank(n: int, c: int, k: int) -> RankingOnly:
    """Compute 1 - (1 - c/n)^k, which is pass@k if c/n is the true rate; biased low, and suitable only for ranking.

    Raises:
        ValueError: as in ``unbiased``, but k may be larger than n.
    """
    n, c, k = _counts(n, c, k)
    return RankingOnly(1.0 - (1.0 - c / n) ** k)


def _counts(n: int, c: int, k: int) -> tuple[int, int, int]:
    n, c, k = read_count(n, "n"), read_count(c, "c"), read_count(k, "k")
    if n < 1 or k < 1 or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {n} samples with {c} correct: expected n >= 1, k >= 1 and 0 <= c <= n.")
    return n, c, k


def read_count(value: int, name: str) -> int:
    """Read a whole number of any integer type.

    Raises:
        ValueError: the value is not a whole number; the message contains its name.
    """
    if isinstance(value, bool):
        raise ValueError(f"{name}={value}: not a count.")
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name}={value}: not a count.") from error


Objective = Literal["loo", "loo_minus_one", "analytic", "groups"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def advantages(right: Tensor | Sequence[bool], k: int, *, objective: Objective | str, seed: int = 0) -> Tensor:
    """Compute the advantages of one group for pass@k, (N,) float64.

    ``loo``: k (g_i - rho(N - 1, c - R_i, k)), g_i = 1 for a correct row, else rho(N - 1, c, k - 1): pass@k with the row
    among the k, minus pass@k without it. This is unbiased for grad pass@k, and equals RLOO at k = 1. It needs k < N.

    ``loo_minus_one``: k C(N - c, k - 1) / C(N - 1, k - 1) for correct rows, 0 for wrong rows: how much the row adds to
    k - 1 other rows (PKPO, arXiv 2505.15201). This is unbiased, and at k = N it is N times verl's ``grpo_passk``
    without std.

    ``analytic``: the mean over all subsets of k rows that contain the row, with the subsets' rewards normalised by
    their mean and std (arXiv 2508.10751, eq. 11 to 14). Its sum is 0, and its size is at most sqrt(N - 1); the scale 1
    / sqrt(R (1 - R)) makes it a different objective. It is 0 if all subsets contain a correct row, or if none does.

    ``groups``: rows are split into N / k groups, and each row's advantage is its group's best reward minus the mean
    over groups. The mean over splits is ``analytic`` before scaling, but the variance is much larger. k must divide N.

    Args:
        right: (N,) bool, or 0 and 1.
        k: number of samples of which at least one must be correct.
        seed: seed of the split.

    Raises:
        ValueError: an unknown objective, a k without a value for the objective, or marks other than 0 and 1.

    Example:
        >>> advantages([1, 0, 0, 0], 2, objective="loo_minus_one").tolist()
        [2.0, 0.0, 0.0, 0.0]
    """
    marks = _marks(right)
    k = read_count(k, "k")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective}: not one of {', '.join(OBJECTIVES)}.")
    if (reason := find_impossible(len(marks), k, objective)) is not None:
        raise ValueError(reason)
    n, c = len(marks), int(marks.sum())
    if objective == "groups":
        return _deal(marks, k, seed)
    of_right, of_wrong = {"loo": _loo, "loo_minus_one": _loo_minus_one, "analytic": _analytic}[objective](n, c, k)
    return torch.tensor([of_wrong, of_right], dtype=torch.float64)[marks.long()]


def find_impossible(n: int, k: int, objective: str) -> str | None:
    """Explain why an objective has no value for k of n rows; None if it has a value."""
    most = n - 1 if objective == "loo" else n
    if k < 1 or k > most:
        return f"k={k} of a group of {n}: {objective} needs 1 <= k <= {most}."
    if objective == "groups" and n % k:
        return f"k={k} of a group of {n}: groups needs a k that divides the group's size."
    return None


def _rho(n: int, c: int, k: int) -> float:
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def _loo(n: int, c: int, k: int) -> tuple[float, float]:
    of_right = k * (1 - _rho(n - 1, c - 1, k)) if c else 0.0
    of_wrong = k * (_rho(n - 1, c, k - 1) - _rho(n - 1, c, k)) if c < n else 0.0
    return of_right, of_wrong


def _loo_minus_one(n: int, c: int, k: int) -> tuple[float, float]:
    return (k * math.comb(n - c, k - 1) / math.comb(n - 1, k - 1) if c else 0.0), 0.0


def _analytic(n: int, c: int, k: int) -> tuple[float, float]:
    if c == 0 or n - c < k:
        return 0.0, 0.0
    # (1 - R) / s = sqrt((1 - R) / R), in whole numbers: 1 - R is below float64's rounding of R if few subsets fail.
    failed = math.comb(n - c, k)
    of_right = math.sqrt(failed / (math.comb(n, k) - failed))
    return of_right, -of_right * c / (n - c)


def _deal(marks: Tensor, k: int, seed: int) -> Tensor:
    order = torch.randperm(len(marks), generator=torch.Generator().manual_seed(seed))
    best = marks[order].view(-1, k).any(-1).double()
    dealt = torch.empty(len(marks), dtype=torch.float64)
    dealt[order] = (best - best.mean()).repeat_interleave(k)
    return dealt


def _marks(right: Tensor | Sequence[bool]) -> Tensor:
    marks = torch.as_tensor(right).cpu()
    if marks.dim() != 1 or len(marks) == 0:
        raise ValueError(f"marks of shape {tuple(marks.shape)}: expected one per row of a group.")
    if not bool(((marks == 0) | (marks == 1)).all()):
        raise ValueError(f"marks {marks.tolist()}: expected 1 (correct) or 0 (wrong).")
    return marks.bool()
