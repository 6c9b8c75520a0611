"""A second implementation of the objectives and of draws, for the proof; it shares no other code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

ERROR = 1e-6
"""Accepted error relative to the largest advantage of a group, in float32."""


def state_none_right(n: int, c: int, k: int) -> float:
    """Compute the probability that k of n rows, drawn without replacement, are all wrong if c rows are correct."""
    return math.prod((n - c - drawn) / (n - drawn) for drawn in range(k)) if n - c >= k else 0.0


def find_difference(seen: Sequence[float], right: Sequence[bool], k: int, objective: str) -> str | None:
    """Compare one group's advantages with those that the objective defines; None if they agree."""
    n, c = len(right), sum(right)
    if objective == "groups":
        return _find_in_deal(seen, right, k)
    others = n - 1
    if objective == "loo":
        of_right = k * state_none_right(others, c - 1, k) if c else 0.0
        of_wrong = k * (state_none_right(others, c, k) - state_none_right(others, c, k - 1)) if c < n else 0.0
    elif objective == "loo_minus_one":
        of_right, of_wrong = (k * state_none_right(others, c - 1, k - 1) if c else 0.0), 0.0
    else:
        missed = state_none_right(n, c, k)
        spread = math.sqrt(missed * (1 - missed))
        of_right = missed / spread if spread > 0 else 0.0
        of_wrong = (missed - state_none_right(others, c, k - 1)) / spread if spread > 0 else 0.0
    allowed = ERROR * max(1.0, abs(of_right), abs(of_wrong))
    for at, (value, is_right) in enumerate(zip(seen, right, strict=True)):
        wanted = of_right if is_right else of_wrong
        if not abs(value - wanted) <= allowed:
            return (
                f"rollout {at} of {n} ({c} right) has the advantage {value:.6g}, but {objective} requires {wanted:.6g}"
            )
    return None


def find_wrong_chance(
    chances: Sequence[float],
    counts: Mapping[str, tuple[float, float]],
    prior: tuple[float, float],
    n: int,
    share: float,
    k: int = 4,
) -> str | None:
    """Compare the draw probabilities of prompts with the probabilities that the budget implies; None if they agree.

    Args:
        chances: probabilities of all prompts.
        counts: number of a prompt -> (its answers, its correct answers), for some prompts.
        prior: a and b of the Beta distribution over all prompts.
        n: rollouts per prompt.
        share: share of uniform draws.
        k: k of pass@k.
    """
    a, b = prior

    pairs = {counts.get(str(prompt), (0.0, 0.0)) for prompt in range(len(chances))}
    # Powers are relative to the hardest prompt's power, which is the largest.
    hardest = max((b + answers - right) / (a + b + answers) for answers, right in pairs)

    def state_worth(answers: float, right: float) -> float:
        p, q = (a + right) / (a + b + answers), (b + answers - right) / (a + b + answers)
        return (q / hardest) ** (k - 1) * sum(math.comb(n, wins) * p**wins * q ** (n - wins) for wins in range(1, n))

    by_counts = {pair: state_worth(*pair) for pair in pairs}
    worth = [by_counts[counts.get(str(prompt), (0.0, 0.0))] for prompt in range(len(chances))]
    whole = math.fsum(worth)
    for prompt, (seen, value) in enumerate(zip(chances, worth, strict=True)):
        wanted = share / len(chances) + (1 - share) * value / whole
        if not abs(seen - wanted) <= ERROR * wanted:
            return f"prompt {prompt} of {len(chances)} is drawn with probability {seen:.6g} instead of {wanted:.6g}"
    return None


def _find_in_deal(seen: Sequence[float], right: Sequence[bool], k: int) -> str | None:
    """Check a split of n rows: if w groups have a correct row, their k w rows have 1 - w k / n, all others -w k / n."""
    n = len(right)
    if not any(right) or (k * sum(right) >= n and all(abs(value) <= ERROR for value in seen)):
        # No group has a correct row, or every group has one.
        return next(
            (f"rollout {at} of {n} has {value:.6g}" for at, value in enumerate(seen) if abs(value) > ERROR), None
        )
    winners = sum(value > 0 for value in seen)
    if winners % k or any(is_right and not value > 0 for value, is_right in zip(seen, right, strict=True)):
        return (
            f"{winners} of {n} rows are above the mean, which is impossible if each group of {k} contains a correct row"
        )
    for at, value in enumerate(seen):
        wanted = float(value > 0) - winners / n
        if not abs(value - wanted) <= ERROR:
            return f"rollout {at} of {n} has {value:.6g}, but groups requires {wanted:.6g}"
    return None
