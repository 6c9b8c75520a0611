"""Verdict on one possible cause of a mismatch, and the thresholds on which the verdict is based.

The thresholds were chosen only on the recordings in tests/data/faults/tuning. The exception is ``above``, which was
chosen on simulated noise, because in those recordings the mass that is cut off is far from this threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ....monitor.alarms.alarms import HEALTHY_KL

Verdict = Literal["present", "absent", "not testable"]

NAMES: Final = (
    "misalignment",
    "re-tokenisation",
    "stale weights",
    "temperature",
    "truncated sampling",
    "extra vocabulary",
    "numerics",
)
"""Every cause, in the order of the tests."""


@dataclass(frozen=True)
class Cause:
    """One possible cause and the verdict on it.

    Attributes:
        name: one of ``NAMES``.
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


def report_absent(name: str, sentence: str, **evidence: float) -> Cause:
    """Build the verdict "absent"."""
    return Cause(name, "absent", evidence, sentence)


def report_untestable(name: str, sentence: str, **evidence: float) -> Cause:
    """Build the verdict "not testable"; ``sentence`` states what is missing."""
    return Cause(name, "not testable", evidence, sentence)


@dataclass(frozen=True)
class Thresholds:
    """Smallest effects that count; an effect's whole interval must lie beyond its threshold.

    Attributes:
        shift: required gain in the correlation of log mu with log pi_old if the adjacent token's log pi_old is used.
        related, part_related: ``related`` is the correlation of log mu with log pi_old over all tokens below which they
            count as unrelated; ``part_related`` is the correlation within a single step or turn that contradicts this.
        healthy: largest KL(mu, pi_old), in nats per token, that needs no explanation.
        turn_factor: KL of a turn divided by the KL of the cleanest turn, at equal probability.
        growth: KL of a step divided by the KL of the freshest steps.
        slope: distance of the slope of log mu on log pi_old, within a context, from 1.
        slope_explains: share of the variance of log pi_old - log mu within contexts that the slope has to explain.
        slope_fits: share of the variance of log mu within contexts that is a linear function of log pi_old.
        missing: total probability, under pi_old, of the tokens that mu excludes.
        one_sided: share of the sum of (log mu - log pi_old)^2 that comes from tokens where mu is larger.
        above: deviation, in nats, of log pi_old - log mu at tokens where pi_old is larger; beyond this deviation, the
            mean ratio does not show that mass was cut off.
        exhausted: number of contexts whose sampled tokens are all that mu allows.
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
