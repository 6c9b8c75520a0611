"""Temperature test: whether, within a context, log mu is a multiple of log pi_old plus a constant.

With logits z, log mu = z / T_mu - log Z_mu and log pi_old = z / T_pi - log Z_pi. Over the tokens of one context, the
slope of log mu on log pi_old is therefore T_pi / T_mu, which is positive for any distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .cause import LEAST_CONTEXTS, THRESHOLDS, Cause, report_absent, report_untestable
from .sampled_tokens import Array, SampledTokens, center_within_contexts, estimate, sum_by_cluster

NAME = "temperature"


def find(sampled: SampledTokens, sampling: Mapping[str, Any]) -> Cause:
    """Test the slope within contexts, and the share of the squared gap that it explains.

    Args:
        sampling: sampling settings in the card, such as ``temperature``; empty if there are none.
    """
    contexts = center_within_contexts(sampled)
    evidence: dict[str, float] = {"contexts": contexts.count}
    if contexts.count < LEAST_CONTEXTS:
        return report_untestable(
            NAME,
            f"only {contexts.count} contexts have two different sampled tokens, and {LEAST_CONTEXTS} are needed: "
            f"record whole groups, with rollout.n of 2 or more",
            **evidence,
        )
    x, y = contexts.old, contexts.mu
    columns = (x * x, x * y, (y - x) ** 2, (y - x) * x, y * y)
    sums = sum_by_cluster(columns, sampled.cluster[contexts.index])
    slope = estimate(sums, _slope)
    explained = estimate(sums, _explained)
    fit = estimate(sums, _fit)
    if slope is None or explained is None or fit is None:
        return report_untestable(NAME, "both policies agree bit for bit", **evidence)
    evidence |= {
        "slope": slope.value,
        "slope_low": slope.low,
        "slope_high": slope.high,
        "explained": explained.value,
        "explained_low": explained.low,
        "fit": fit.value,
        "fit_low": fit.low,
    }
    # Distance of the interval from 1; negative if the interval contains 1.
    distance = max(slope.low - 1.0, 1.0 - slope.high)
    if distance <= THRESHOLDS.slope or explained.low <= THRESHOLDS.slope_explains:
        return report_absent(
            NAME,
            f"within a context log mu is {slope.value:.3f} times log pi_old, which explains {explained.value:.0%} of "
            f"the gap",
            **evidence,
        )
    if slope.low <= 0.0 or fit.low <= THRESHOLDS.slope_fits:
        return report_absent(
            NAME,
            f"within a context log mu is {slope.value:.3f} [{slope.low:.3f}, {slope.high:.3f}] times log pi_old with "
            f"an R^2 of {fit.value:.2f}, which no temperature can explain",
            **evidence,
        )
    return Cause(
        NAME,
        "present",
        evidence,
        f"within a context log mu is {slope.value:.3f} [{slope.low:.3f}, {slope.high:.3f}] times log pi_old, which "
        f"explains {explained.value:.0%} of the gap: mu was computed at {1 / slope.value:.3f} times the trainer's "
        f"temperature",
        "use the same temperature for both engines, and log-probs computed after it is applied: "
        f"{_same_temperature(sampling.get('temperature'))} actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
    )


def _same_temperature(sampled_at: Any) -> str:
    """Format the override with which the trainer scores at the sampling temperature of the run."""
    known = isinstance(sampled_at, int | float) and not isinstance(sampled_at, bool)
    if known and math.isfinite(sampled_at) and sampled_at > 0:
        return f"actor_rollout_ref.rollout.temperature={float(sampled_at)!r}"
    return (
        "actor_rollout_ref.rollout.temperature at the value at which the engine samples, no other temperature in the "
        "engine's own settings, and"
    )


def _slope(sums: Array) -> float:
    """Compute the slope of log mu on log pi_old within contexts."""
    return float(sums[1] / sums[0])


def _fit(sums: Array) -> float:
    """Compute R^2 of log mu on log pi_old within contexts."""
    return float(sums[1] ** 2 / (sums[0] * sums[4]))


def _explained(sums: Array) -> float:
    """Compute the share of the squared gap within contexts that is linear in log pi_old."""
    return float(sums[3] ** 2 / (sums[0] * sums[2]))
