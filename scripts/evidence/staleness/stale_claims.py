"""Claims on the scores by eta, asserted at the far end of bootstrap intervals, and what does not reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Scores = Mapping[tuple[str, float, float], Sequence[float]]
"""(arm, eta, rate) -> the score of each seed."""

DRAWS = 10_000
CONFIDENCE = 0.9
MOST_OF_BYPASS, LEAST_OF_DECOUPLED = 0.5, 0.7


class ClaimError(AssertionError):
    """A claim does not hold; the message has its figures."""


@dataclass(frozen=True)
class Ratio:
    """Mean score of one setting over that of synchronous training at the same rate, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def compute_ratio(scores: Sequence[float], synchronous: Sequence[float]) -> Ratio:
    """Compute the ratio of means with a percentile bootstrap over the seeds of both."""
    rng = np.random.default_rng(0)
    one, other = np.asarray(scores), np.asarray(synchronous)
    drawn = (each[rng.integers(len(each), size=(DRAWS, len(each)))].mean(1) for each in (one, other))
    top, bottom = drawn
    edge = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(top / bottom, [edge, 100 - edge])
    return Ratio(float(one.mean() / other.mean()), float(low), float(high))


def check_claims(scores: Scores, rates: Sequence[float]) -> list[str]:
    """Check that clipping around mu collapses at eta 8 and that decoupled PPO does not; return sentences.

    Raises:
        ClaimError: one of them does not hold over its whole interval.
    """
    sentences: list[str] = []
    broken: list[str] = []
    for rate in rates:
        of = {arm: compute_ratio(scores[arm, 8, rate], scores[arm, 0, rate]) for arm in ("bypass", "decoupled_ppo")}
        naive, decoupled = of["bypass"], of["decoupled_ppo"]
        claims = (
            (
                naive.high <= MOST_OF_BYPASS,
                f"rate {rate:g}: bypass at eta 8 reaches {naive} of synchronous training, at most {MOST_OF_BYPASS}",
            ),
            (
                decoupled.low >= LEAST_OF_DECOUPLED,
                f"rate {rate:g}: decoupled_ppo at eta 8 reaches {decoupled} of it, at least {LEAST_OF_DECOUPLED}",
            ),
        )
        for holds, sentence in claims:
            (sentences if holds else broken).append(sentence)
    if broken:
        raise ClaimError("; ".join(broken))
    return sentences


def describe_one_step_behind(scores: Scores, rates: Sequence[float]) -> list[str]:
    """Say whether "naive eta = 1 degraded" reproduces: only where the whole interval lies below 1."""
    sentences = []
    for rate in rates:
        found = compute_ratio(scores["bypass", 1, rate], scores["bypass", 0, rate])
        shown = "reproduces" if found.high < 1 else "does not reproduce"
        sentences.append(f'rate {rate:g}: "naive eta = 1 degraded" {shown}: {found} of synchronous training')
    return sentences
