"""Verdict on one possible cause of a mismatch, and the thresholds that decide it.

Chosen on the recordings in tests/data/faults/tuning alone, except ``above``, which was set on simulated noise: in
those recordings the mass cut off lies far from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ....monitor.alarms.watched import HEALTHY_KL

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
"""Every cause, in the order in which they are looked for."""


@dataclass(frozen=True)
class Cause:
    """One possible cause and the verdict on it.

    Attributes:
        name: one of ``NAMES``.
        verdict: "not testable" where the recording holds nothing to judge it by; ``sentence`` says what is lacking.
        evidence: what was measured, by name: effects, interval ends, counts.
        sentence: the finding, with its numbers.
        fix: a Hydra override or what else to do; empty unless present.
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
    """Build the verdict "not testable"; ``sentence`` says what is lacking."""
    return Cause(name, "not testable", evidence, sentence)


@dataclass(frozen=True)
class Thresholds:
    """Smallest effects that count; the interval of an effect has to lie beyond its threshold.

    Attributes:
        shift: by how much log mu has to correlate better with the log pi_old of the token alongside.
        related, part_related: correlation of log mu with log pi_old below which, over all tokens, they are
            unrelated; and that of one step or turn which contradicts it.
        healthy: KL(mu, pi_old), nats a token, up to which a mismatch without a cause needs none.
        turn_factor: KL of one turn over that of the cleanest one, at equal probability.
        growth: KL of a step over that of the freshest steps.
        slope: distance from 1 of the slope of log mu on log pi_old within a context.
        slope_explains: share of the variance of log pi_old - log mu within contexts that the slope has to explain.
        slope_fits: share of the variance of log mu within contexts that is linear in log pi_old.
        missing: probability under pi_old that mu has not kept.
        one_sided: share of the sum of (log mu - log pi_old)^2 where mu is the larger one.
        above: deviation, in nats, of log pi_old - log mu where pi_old is the larger one, beyond which its mean says
            nothing of mass that was cut off.
        exhausted: contexts whose sampled tokens are all that mu allows, a count.
        noise: standard deviation of log pi_old - log mu, in nats, of tokens with a probability of 0.1 to 0.9.
        tail: this deviation below a probability of 0.1 over that above 0.5.
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
"""Tokens that a test needs."""
LEAST_CONTEXTS = 20
"""Contexts with two different sampled tokens that a slope test needs."""
THRESHOLDS = Thresholds()
