"""pass@k over prompts: means with intervals by the bootstrap over prompts, and the fit beyond the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .beta_binomial import Extrapolation, NotIdentified, extrapolate_with_intervals
from .estimators import unbiased, unbiased_dynamic

DRAWS, BLOCK = 2000, 100


@dataclass(frozen=True)
class Stopping:
    """When sampling of a prompt ended: at the first of ``looks`` with ``successes`` right, or at the last."""

    looks: tuple[int, ...]
    successes: int


@dataclass(frozen=True)
class Summary:
    """pass@k of one set of prompts.

    Attributes:
        prompts, samples: their numbers.
        unsolved: share of prompts without a right answer.
        points: k -> (mean, lower, upper end of the 95 % interval over prompts); the interval is NaN for one prompt.
        left_out: k for which some prompt has too few samples.
        fit: a, b and extrapolations; None if they are not identified.
        not_identified: the reason.
    """

    prompts: int
    samples: int
    unsolved: float
    points: dict[int, tuple[float, float, float]]
    left_out: tuple[int, ...]
    fit: Extrapolation | None
    not_identified: str


def summarize(
    n: Sequence[int],
    c: Sequence[int],
    ks: Sequence[int],
    *,
    extrapolate: Sequence[int] = (),
    stopping: Stopping | None = None,
    seed: int = 0,
    draws: int = DRAWS,
) -> Summary:
    """Summarize the prompts' counts.

    Args:
        n, c: samples and right ones of each prompt.
        ks: values of k for unbiased estimates; those above a prompt's samples are left out.
        extrapolate: values of k for the Beta-binomial fit.
        stopping: the rule by which sampling ended early; None: n was fixed beforehand.
    """
    if not n or len(n) != len(c):
        raise ValueError(f"{len(n)} and {len(c)} counts: expected one of each per prompt, and at least one prompt.")
    most = stopping.looks[-1] if stopping else min(n)
    fitting = [k for k in ks if k <= most]

    def estimate(samples: int, right: int, k: int) -> float:
        if stopping is None:
            return unbiased(samples, right, k)
        return unbiased_dynamic(stopping.looks, samples, right, k, successes=stopping.successes)

    # Prompts with equal counts have equal estimates.
    pairs = sorted(set(zip(n, c, strict=True)))
    by_pair = {pair: [estimate(*pair, k) for k in fitting] for pair in pairs}
    values = torch.tensor([by_pair[pair] for pair in zip(n, c, strict=True)], dtype=torch.float64)
    values = values.view(len(n), len(fitting))
    ends = _bootstrap(values, draws, seed)
    points = {k: (float(values[:, at].mean()), float(ends[0, at]), float(ends[1, at])) for at, k in enumerate(fitting)}
    fit, reason = None, ""
    if extrapolate:
        try:
            fit = extrapolate_with_intervals(list(n), list(c), list(extrapolate), seed=seed, draws=min(draws, 400))
        except NotIdentified as error:
            reason = str(error)
    return Summary(
        prompts=len(n),
        samples=sum(n),
        unsolved=sum(right == 0 for right in c) / len(c),
        points=points,
        left_out=tuple(k for k in ks if k > most),
        fit=fit,
        not_identified=reason,
    )


def _bootstrap(values: Tensor, draws: int, seed: int) -> Tensor:
    """Compute the ends of the 95 % bootstrap interval of each column's mean over rows, (2, K)."""
    prompts, columns = values.shape
    if prompts < 2 or columns == 0:
        return torch.full((2, columns), math.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, draws, BLOCK):
        rows = torch.randint(prompts, (min(BLOCK, draws - start), prompts), generator=generator)
        means.append(values[rows].mean(1))
    return torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
