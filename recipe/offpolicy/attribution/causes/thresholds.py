"""Where each test draws its line. Chosen on the recordings in tests/data/faults/tuning, and on nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Least effects; the interval of an effect has to lie beyond its threshold.

    Attributes:
        shift: by how much log mu has to correlate better with the log pi_old of the token beside.
        turn_factor: KL of one turn over that of the cleanest one, at equal probability.
        growth: KL of a step over that of the freshest steps.
        slope: distance from 1 of the slope of log mu on log pi_old within a context.
        slope_explains: share of the variance of log pi_old - log mu within contexts that the slope has to explain.
        missing: probability under pi_old that mu has not kept.
        one_sided: share of the sum of (log mu - log pi_old)^2 where mu is the larger one.
        exhausted: contexts whose sampled tokens are all that mu allows, a count.
        noise: standard deviation of log pi_old - log mu, in nats, of tokens with a probability of 0.1 to 0.9.
        tail: this deviation below a probability of 0.1 over that above 0.5.
    """

    shift: float = 0.1
    turn_factor: float = 5.0
    growth: float = 3.0
    slope: float = 0.03
    slope_explains: float = 0.5
    missing: float = 0.002
    one_sided: float = 0.7
    exhausted: int = 3
    noise: float = 0.03
    tail: float = 1.5


LEAST_TOKENS = 200
"""Tokens below which no test is made."""
LEAST_CONTEXTS = 20
"""Contexts with two different sampled tokens below which nothing is said about slopes."""
THRESHOLDS = Thresholds()
