"""Findings on a mismatch without a present cause: healthy, or large and unexplained."""

from __future__ import annotations

import math

from .attribution import Attribution
from .causes import misalignment
from .causes.thresholds import THRESHOLDS


def compute_kl(attribution: Attribution) -> float:
    """Compute KL(mu, pi_old) by k3, nats a token, over all tokens; NaN where there are none."""
    tokens = sum(version.tokens for version in attribution.versions)
    return sum(version.k3 * version.tokens for version in attribution.versions) / tokens if tokens else math.nan


def is_healthy(attribution: Attribution) -> bool:
    """Check whether KL(mu, pi_old) is no larger than two healthy engines leave it."""
    return compute_kl(attribution) <= THRESHOLDS.healthy


def describe_unexplained(attribution: Attribution) -> str:
    """Describe an attribution without a present cause in one or two sentences."""
    kl = compute_kl(attribution)
    if not is_healthy(attribution):
        return (
            f"A large mismatch of unknown cause: KL(mu, pi_old) {kl:.2g} nats a token, where two healthy engines leave "
            f"at most {THRESHOLDS.healthy:g}.{_only_stale(attribution)}"
        )
    if all(cause.verdict == "not testable" for cause in attribution.causes):
        why = list(dict.fromkeys(cause.sentence for cause in attribution.causes))
        return f"No cause can be looked for: {'; '.join(why)}."
    correlation = _correlation(attribution)
    if correlation < THRESHOLDS.related:
        return (
            f"KL(mu, pi_old) is small, {kl:.2g} nats a token, but log pi_old and log mu correlate at {correlation:.2f} "
            f"only: the recorded log-probs are too alike to tell a cause."
        )
    return (
        f"No cause stands out: what differs is as small and as even as two healthy engines leave it, {kl:.2g} nats a "
        f"token of KL(mu, pi_old)."
    )


def _only_stale(attribution: Attribution) -> str:
    """Add that age alone may be the cause, where no row is fresh; else empty."""
    ages = [version.staleness for version in attribution.versions]
    # With fresh rows the decomposition has already separated age; unknown versions say nothing of it.
    if 0 in ages or max(ages, default=-1) < 1:
        return ""
    age = f"{max(ages)} step{'s' * (max(ages) > 1)}"
    return f" Weights up to {age} old sampled it and no row is fresh, so that age alone may be why."


def _correlation(attribution: Attribution) -> float:
    """Return the measured correlation of log mu and log pi_old at the same token; NaN where not measured."""
    found = (cause for cause in attribution.causes if cause.name == misalignment.NAME)
    return next((cause.evidence.get("correlation_0", math.nan) for cause in found), math.nan)
