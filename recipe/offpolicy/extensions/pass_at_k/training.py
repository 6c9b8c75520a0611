"""Advantages of one group whose mean over rows of A grad log p is the gradient of pass@k, or a surrogate of it.

N samples of a prompt, c of them right, rho(n, c, k) = 1 - C(n - c, k) / C(n, k).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .estimators import read_count

Objective = Literal["loo", "loo_minus_one", "analytic", "groups"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def advantages(right: Tensor | Sequence[bool], k: int, *, objective: Objective | str, seed: int = 0) -> Tensor:
    """Compute the advantages of one group for pass@k, (N,) float64.

    ``loo``: k (g_i - rho(N - 1, c - R_i, k)), g_i = 1 for a right row, else rho(N - 1, c, k - 1): pass@k with the row
    among the k, minus pass@k without it. Unbiased for grad pass@k; at k = 1 it is RLOO. Needs k < N.

    ``loo_minus_one``: k C(N - c, k - 1) / C(N - 1, k - 1) for right rows, 0 for wrong ones: how much the row adds to
    k - 1 others (PKPO, arXiv 2505.15201). Unbiased; at k = N it is N times verl's ``grpo_passk`` without std.

    ``analytic``: the mean over all subsets of k, by mean and std of their rewards (arXiv 2508.10751, eq. 11 to 14).
    Sums to 0; its scale 1 / sqrt(R (1 - R)) makes it another objective, at most sqrt(N - 1). 0 if every subset of k
    holds a right row, or none does.

    ``groups``: rows are split into N / k groups, and each row gets its group's best reward minus the mean over groups;
    its mean over splits is ``analytic`` before scaling, with much more variance. Needs a k that divides N.

    Args:
        right: (N,) bool, or 0 and 1.
        k: number of samples of which one must be right.
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
    """Explain why an objective has no value for k of n rows; None if it has one."""
    most = n - 1 if objective == "loo" else n
    if k < 1 or k > most:
        return f"k={k} of a group of {n}: {objective} needs 1 <= k <= {most}."
    if objective == "groups" and n % k:
        return f"k={k} of a group of {n}: groups needs a k that divides it."
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
        raise ValueError(f"marks {marks.tolist()}: expected right or wrong, 1 or 0.")
    return marks.bool()
