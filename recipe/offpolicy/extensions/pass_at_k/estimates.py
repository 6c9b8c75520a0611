"""Estimates of pass@k: unbiased per prompt, means over prompts with intervals, and a beta-binomial fit.

A prompt has N samples, of which c are correct; rho(n, c, k) = 1 - C(n - c, k) / C(n, k). The fit assumes that a
prompt's success rate is drawn from Beta(a, b), and its number of successes from a binomial distribution. A rule that
ends sampling early does not change the likelihood, so counts of dynamic rounds need no adjustment.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def unbiased(n: int, c: int, k: int) -> float:
    """Estimate pass@k from c correct of n samples, unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    n must be fixed before sampling. If the results decide when sampling ends, use ``unbiased_dynamic``.

    Raises:
        ValueError: k > n, c > n or n < 1.

    Example:
        >>> unbiased(4, 1, 4), unbiased(4, 1, 2)
        (1.0, 0.5)
    """
    _check_counts(n, c, k)
    if k > n:
        raise ValueError(f"pass@{k} of {n} samples: k must be at most n.")
    return rho(n, c, k)


def rho(n: int, c: int, k: int) -> float:
    """Compute the share of subsets of k samples that contain a correct sample."""
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def unbiased_dynamic(looks: Sequence[int], n: int, c: int, k: int, *, successes: int) -> float:
    """Estimate pass@k, unbiased, if sampling ends at the first look with enough successes.

    (1 - p)^k is estimated by the share of possible sample orders that begin with k failures. This is the number of
    paths from k failures to (n, c), divided by the number of paths from the start; both count only paths that avoid all
    points at which sampling would have ended. With such a stopping rule, ``unbiased`` overestimates pass@k. k may be
    larger than n.

    Args:
        looks: cumulative numbers of samples after which the results are checked, such as 8, 16, 32.
        n, c: samples and successes of a prompt at the look at which sampling ended.
        k: the k of pass@k, at most the last look.
        successes: sampling ends at the first look with this many successes, or at the last look.

    Raises:
        ValueError: k > the last look, c > n, n is not a look, or sampling does not end at or cannot reach this point.

    Example:
        >>> round(unbiased_dynamic([8, 16], 8, 1, 8, successes=1), 3), unbiased_dynamic([8, 16], 16, 0, 8, successes=1)
        (1.0, 0.0)
    """
    _check_counts(n, c, k)
    at = tuple(looks)
    if k > at[-1]:
        raise ValueError(f"pass@{k} with a last look at {at[-1]} samples: k must be at most the last look.")
    if n not in at:
        raise ValueError(f"{n} samples: sampling ends at one of {list(at)}.")
    if n < at[-1] and c < successes:
        raise ValueError(f"{c} of {n} samples are correct: sampling continues until {successes} are correct.")
    paths = _count_paths(at, successes, 0).get((n, c), 0)
    if paths == 0:
        ended = f"with {successes} correct, sampling would have ended at an earlier look"
        raise ValueError(f"{c} of {n} samples are correct: {ended}.")
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


def rank(n: int, c: int, k: int) -> float:
    """Compute 1 - (1 - c/n)^k, which is pass@k if c/n is the true rate. It is biased low; use it only for ranking.

    Raises:
        ValueError: as in ``unbiased``, but k may be larger than n.
    """
    _check_counts(n, c, k)
    return 1.0 - (1.0 - c / n) ** k


def _check_counts(n: int, c: int, k: int) -> None:
    if n < 1 or k < 1 or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {n} samples with {c} correct: expected n >= 1, k >= 1 and 0 <= c <= n.")


ITERATIONS = 200
LARGEST_SUM, SMALLEST = 1e3, 1e-6
"""If (a + b) / n exceeds ``LARGEST_SUM``, the likelihood is flat (no over-dispersion). If a or b is below ``SMALLEST``,
each prompt's samples are all correct or all wrong."""


class NotIdentified(ValueError):
    """The counts do not determine a and b; the message gives the reason."""


def fit(n: Tensor | Sequence[int], c: Tensor | Sequence[int]) -> tuple[float, float]:
    """Fit Beta(a, b) to the prompts' success rates by maximum likelihood.

    Args:
        n: (P,) number of samples of each prompt, 1 or more; the numbers may differ.
        c: (P,) correct samples of each prompt.

    Returns:
        a, b.

    Raises:
        NotIdentified: there is only one prompt, or one sample per prompt; or each prompt's samples are all correct or
            all wrong; or the counts vary no more than with one rate for all prompts.
    """
    n, c = (torch.as_tensor(values).double() for values in (n, c))
    if len(n) < 2:
        raise NotIdentified(f"{len(n)} prompt: a distribution over prompts needs at least two.")
    if bool((c == 0).all()) or bool((c == n).all()):
        raise NotIdentified(f"all samples are {'wrong' if bool((c == 0).all()) else 'right'}.")
    if bool((n < 2).all()):
        raise NotIdentified("there is only one sample per prompt, so it is unknown how prompts differ.")
    if bool(((c == 0) | (c == n)).all()):
        raise NotIdentified("each prompt's samples are all correct or all wrong, so no rate in between is observed.")
    pairs, weights = _compress(n, c)
    a, b, found = maximise_likelihood(pairs[:, 0], pairs[:, 1], weights[None])
    if not bool(found[0]):
        raise NotIdentified("the counts vary between prompts no more than with a single rate for all prompts.")
    return float(a[0]), float(b[0])


def extrapolate(a: float, b: float, k: int) -> float:
    """Compute pass@k for success rates distributed as Beta(a, b): 1 - B(a, b + k) / B(a, b).

    Example:
        >>> round(extrapolate(1.0, 1.0, 3), 12)
        0.75
    """
    log_none = math.lgamma(b + k) - math.lgamma(b) - math.lgamma(a + b + k) + math.lgamma(a + b)
    return -math.expm1(log_none)


@dataclass(frozen=True)
class Extrapolation:
    """A fit and its extrapolations, with 95 % bootstrap intervals over prompts.

    Attributes:
        a, b: parameters of the fit.
        points: maps k to (pass@k, lower end, upper end); the ends are NaN if too many bootstrap fits are not
            identified.
    """

    a: float
    b: float
    points: dict[int, tuple[float, float, float]]


def extrapolate_with_intervals(
    n: Tensor | Sequence[int], c: Tensor | Sequence[int], ks: Sequence[int], *, draws: int = 400, seed: int = 0
) -> Extrapolation:
    """Fit Beta(a, b) and extrapolate pass@k, with bootstrap intervals over prompts.

    Raises:
        NotIdentified: as ``fit``.
    """
    n, c = (torch.as_tensor(values).double() for values in (n, c))
    a, b = fit(n, c)
    pairs, weights = _compress(n, c)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(weights, draws * len(n), replacement=True, generator=generator).view(draws, len(n))
    drawn = torch.zeros(draws, len(weights), dtype=torch.float64)
    drawn.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    many_a, many_b, found = maximise_likelihood(pairs[:, 0], pairs[:, 1], drawn)
    points = {}
    for k in ks:
        low = high = math.nan
        if float(found.double().mean()) >= 0.95:
            values = torch.tensor(
                [extrapolate(x, y, k) for x, y in zip(many_a[found].tolist(), many_b[found].tolist(), strict=True)]
            )
            low, high = torch.quantile(values, torch.tensor([0.025, 0.975])).tolist()
        points[k] = (extrapolate(a, b, k), low, high)
    return Extrapolation(a, b, points)


def maximise_likelihood(n: Tensor, c: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximise the Beta-binomial likelihood, for several weightings of the same counts at once.

    Takes Newton steps on (log a, log b), damped so that the likelihood never decreases.

    Args:
        n, c: (U,) float64 counts.
        weights: (D, U) number of prompts with each pair of counts.

    Returns:
        (D,) a, (D,) b and (D,) bool, False where the likelihood has no interior maximum.
    """
    total = weights.sum(-1, keepdim=True).clamp(min=1e-300)
    weights = weights / total
    mean = ((weights * c).sum(-1) / (weights * n).sum(-1)).clamp(1e-4, 1 - 1e-4)
    x = torch.stack([mean, 1 - mean], -1).log()
    damping = torch.full((len(weights),), 1e-3, dtype=torch.float64)
    value = _log_likelihood(x, n, c, weights)
    for _ in range(ITERATIONS):
        gradient, hessian = _derivatives(x, n, c, weights)
        if bool((gradient.abs().amax(-1) < 1e-11).all()):
            break
        # Damping by the smallest eigenvalue makes the negative Hessian positive definite.
        floor = torch.linalg.eigvalsh(-hessian)[:, 0].clamp(max=0).abs()
        shift = (floor + damping)[:, None, None] * torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(shift - hessian, gradient)
        moved = x + step.clamp(-2, 2)
        risen = _log_likelihood(moved, n, c, weights)
        better = risen >= value
        x = torch.where(better[:, None], moved, x).clamp(-40, 40)
        value = torch.where(better, risen, value)
        damping = torch.where(better, damping / 10, damping * 10).clamp(1e-12, 1e12)
    a, b = x.exp().unbind(-1)
    inside = (a + b < LARGEST_SUM * n.max()) & (torch.minimum(a, b) > SMALLEST) & torch.isfinite(value)
    return a, b, inside


def _log_likelihood(x: Tensor, n: Tensor, c: Tensor, weights: Tensor) -> Tensor:
    a, b = x.exp()[..., None].unbind(-2)
    each = _log_beta(a + c, b + n - c) - _log_beta(a, b)
    return (weights * each).sum(-1)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)


def _derivatives(x: Tensor, n: Tensor, c: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute gradient (D, 2) and Hessian (D, 2, 2) at log a, log b."""
    a, b = x.exp()[..., None].unbind(-2)

    def total(values: Tensor) -> Tensor:
        return (weights * values).sum(-1)

    both = total(torch.digamma(a + b) - torch.digamma(a + b + n))
    by_a = total(torch.digamma(a + c) - torch.digamma(a)) + both
    by_b = total(torch.digamma(b + n - c) - torch.digamma(b)) + both
    bent = total(torch.polygamma(1, a + b) - torch.polygamma(1, a + b + n))
    by_aa = total(torch.polygamma(1, a + c) - torch.polygamma(1, a)) + bent
    by_bb = total(torch.polygamma(1, b + n - c) - torch.polygamma(1, b)) + bent
    a, b = a[:, 0], b[:, 0]
    gradient = torch.stack([by_a * a, by_b * b], -1)
    cross = bent * a * b
    hessian = torch.stack([by_aa * a * a + by_a * a, cross, cross, by_bb * b * b + by_b * b], -1).view(-1, 2, 2)
    return gradient, hessian


def _compress(n: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Group equal counts: (U, 2) distinct pairs, and (U,) the number of prompts with each pair."""
    pairs, times = torch.unique(torch.stack([n, c], -1), dim=0, return_counts=True)
    return pairs, times.double()


DRAWS, BLOCK = 2000, 100


@dataclass(frozen=True)
class Stopping:
    """Rule that ends sampling of a prompt: at the first look with ``successes`` correct answers, or at the last one."""

    looks: tuple[int, ...]
    successes: int


@dataclass(frozen=True)
class Summary:
    """pass@k of one set of prompts.

    Attributes:
        prompts, samples: number of prompts, and number of samples.
        unsolved: share of prompts without a correct answer.
        points: maps k to (mean, lower end, upper end) of the 95 % interval over prompts; the ends are NaN for one
            prompt.
        left_out: values of k without an estimate, because some prompt has too few samples.
        fit: a, b and the extrapolations; None if a and b are not identified.
        not_identified: the reason why a and b are not identified.
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
        n, c: samples and correct samples of each prompt.
        ks: values of k for unbiased estimates; values above a prompt's number of samples are left out.
        extrapolate: values of k for the Beta-binomial fit.
        stopping: the rule that ended sampling early; None if n was fixed beforehand.
    """
    most = stopping.looks[-1] if stopping else min(n)
    fitting = [k for k in ks if k <= most]

    def estimate(samples: int, right: int, k: int) -> float:
        if stopping is None:
            return unbiased(samples, right, k)
        return unbiased_dynamic(stopping.looks, samples, right, k, successes=stopping.successes)

    # Prompts with equal counts have equal estimates.
    by_pair = {pair: [estimate(*pair, k) for k in fitting] for pair in set(zip(n, c, strict=True))}
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
    """Compute the 95 % bootstrap interval of each column's mean over rows, (2, K)."""
    prompts, columns = values.shape
    if prompts < 2 or columns == 0:
        return torch.full((2, columns), math.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, draws, BLOCK):
        rows = torch.randint(prompts, (min(BLOCK, draws - start), prompts), generator=generator)
        means.append(values[rows].mean(1))
    return torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
