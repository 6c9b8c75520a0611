"""Verdict on one possible cause of a mismatch, and the estimates and thresholds on which the verdict is based.

The thresholds were chosen only on the recordings in tests/data/faults/tuning. The exception is ``above``, which was
chosen on simulated noise, because no recording there comes close to this threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from ...monitor.alarms import HEALTHY_KL

Array = NDArray[np.float64]
Values = NDArray[np.generic]
Verdict = Literal["present", "absent", "not testable"]

MISALIGNMENT, RETOKENISATION, STALE = "misalignment", "re-tokenisation", "stale weights"
TEMPERATURE, TRUNCATED, EXTRA, NUMERICS = "temperature", "truncated sampling", "extra vocabulary", "numerics"
NAMES: Final = (MISALIGNMENT, RETOKENISATION, STALE, TEMPERATURE, TRUNCATED, EXTRA, NUMERICS)
"""Every cause, in the order of the tests."""


@dataclass(frozen=True)
class Cause:
    """One possible cause and the verdict on it.

    Attributes:
        name: one of ``NAMES``, or a cause in the delivery of weights.
        verdict: "present", "absent", or "not testable" if the recording lacks the data that the test needs.
        evidence: the measurements by name: effects, interval ends, counts.
        sentence: the finding with its numbers, or what is missing for a test.
        fix: a Hydra override, or another remedy; empty unless the cause is present.
    """

    name: str
    verdict: Verdict
    evidence: Mapping[str, float]
    sentence: str
    fix: str = ""


def report_untestable(names: Iterable[str], sentence: str) -> list[Cause]:
    """Build the verdict "not testable" for several causes; ``sentence`` says what is missing."""
    return [Cause(name, "not testable", {}, sentence) for name in names]


@dataclass(frozen=True)
class Thresholds:
    """Smallest effects that count; an effect's whole interval must lie beyond its threshold.

    Attributes:
        shift: required gain in the correlation of log mu with log pi_old if the adjacent token's log pi_old is used.
        related, part_related: log mu and log pi_old count as unrelated if their correlation over all tokens is below
            ``related``, unless their correlation within a single step or turn is above ``part_related``.
        healthy: largest KL(mu, pi_old), in nats per token, that needs no explanation.
        turn_factor: KL of a turn divided by the KL of the cleanest turn, at equal probability.
        growth: KL of a step divided by the KL of the freshest steps.
        slope: distance of the slope of log mu on log pi_old, within a context, from 1.
        slope_explains: share of the variance of log pi_old - log mu within contexts that the slope must explain.
        slope_fits: share of the variance of log mu within contexts that is a linear function of log pi_old.
        missing: total probability, under pi_old, of the tokens that mu excludes.
        one_sided: share of the sum of (log mu - log pi_old)^2 that comes from tokens where mu is larger.
        above: deviation, in nats, of log pi_old - log mu at tokens where pi_old is larger; beyond this deviation, the
            mean ratio does not show that mass was cut off.
        exhausted: minimum number of contexts in which every token that mu allows was sampled.
        noise: standard deviation of log pi_old - log mu, in nats, over tokens with a probability of 0.1 to 0.9.
        tail: the standard deviation for probabilities below 0.1, divided by the standard deviation for probabilities
            above 0.5.
    """

    shift: float = 0.1
    related: float = 0.2
    part_related: float = 0.5
    healthy: float = HEALTHY_KL
    turn_factor: float = 5.0
    growth: float = 3.0
    slope: float = 0.03
    slope_explains: float = 0.5
    slope_fits: float = 0.8
    missing: float = 0.002
    one_sided: float = 0.7
    above: float = 0.5
    exhausted: int = 3
    noise: float = 0.03
    tail: float = 1.5


LEAST_TOKENS = 200
"""Minimum number of tokens for a test to run."""
LEAST_CONTEXTS = 20
"""Minimum number of contexts, each with at least two different sampled tokens, for a slope test to run."""
THRESHOLDS = Thresholds()
REPLICATES = 400


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 98 % interval, computed by resampling prompts."""

    value: float
    low: float
    high: float

    def name(self, name: str, *ends: str) -> dict[str, float]:
        """Return the value and the given ends of its interval as evidence: ``name``, ``name_low``, ``name_high``."""
        return {name: self.value, **{f"{name}_{end}": getattr(self, end) for end in ends}}


def estimate(
    columns: Iterable[Values], cluster: NDArray[np.int64], statistic: Callable[[Array], float]
) -> Estimate | None:
    """Estimate a statistic of sums over all tokens, with a cluster-bootstrap interval; None if it is not finite.

    Args:
        columns: k columns, (n,) each.
        cluster: (n,), see ``SampledTokens``.
        statistic: computes the statistic from the k totals.
    """
    there = np.bincount(cluster) > 0
    sums = np.stack([np.bincount(cluster, weights=column)[there] for column in columns], axis=-1)
    count = len(sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = statistic(sums.sum(0)) if count else np.nan
        if not np.isfinite(value):
            return None
        # Drawing clusters with replacement is the same as drawing multinomial counts, and sums of columns need only
        # these counts.
        weights = np.random.default_rng(0).multinomial(count, np.full(count, 1.0 / count), size=REPLICATES)
        drawn = np.array([statistic(row) for row in weights @ sums])
    drawn = drawn[np.isfinite(drawn)]
    # If draws that are not finite were left out, the interval would have a selection bias.
    if len(drawn) < REPLICATES / 2:
        return None
    return Estimate(float(value), float(np.percentile(drawn, 1)), float(np.percentile(drawn, 99)))


def estimate_ratio(part: Values, whole: Values, cluster: NDArray[np.int64]) -> Estimate | None:
    """Estimate the sum of one column divided by the sum of another; see ``estimate``."""
    return estimate((part, whole), cluster, lambda sums: float(sums[0] / sums[1]))
