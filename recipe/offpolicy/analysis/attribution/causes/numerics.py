"""Numerics test: whether two engines round differently.

The gap has no preferred sign and is the same at every step. Its tail is heavy at low probability, where the normaliser
does not damp errors in the logits.
"""

from __future__ import annotations

import numpy as np

from ....correction.recommended import BATCH_INVARIANT
from .cause import LEAST_CONTEXTS, LEAST_TOKENS, THRESHOLDS, Cause, report_absent, report_untestable
from .sampled_tokens import Array, SampledTokens, center_within_contexts, estimate, sum_by_cluster

NAME = "numerics"
LOW, MIDDLE, HIGH = np.log(0.1), np.log(0.5), np.log(0.9)


def find(sampled: SampledTokens, *, offset: bool) -> Cause:
    """Test the standard deviation of the gap at medium probabilities, and how much it grows towards low probability.

    Args:
        offset: whether mu lies above pi_old by a constant in each context; if so, the test uses only the variation
            within contexts.
    """
    mu, gap, cluster = sampled.tokens.mu, sampled.tokens.gap, sampled.cluster
    if offset:
        contexts = center_within_contexts(sampled)
        if contexts.count < LEAST_CONTEXTS:
            return report_untestable(
                NAME, f"only {contexts.count} contexts have two different sampled tokens", contexts=contexts.count
            )
        # Centring removes the offset of each context.
        mu, gap, cluster = mu[contexts.index], contexts.old - contexts.mu, cluster[contexts.index]
    if len(gap) < LEAST_TOKENS:
        return report_untestable(NAME, f"fewer than {LEAST_TOKENS} tokens are left for the test")
    low, middle, high = mu < LOW, (mu >= LOW) & (mu < HIGH), mu >= MIDDLE
    columns = (column for chosen in (low, middle, high) for column in (chosen, chosen * gap, chosen * gap * gap))
    sums = sum_by_cluster(columns, cluster)
    noise = estimate(sums, lambda total: _deviation(total[3:6]))
    tail = estimate(sums, lambda total: _deviation(total[:3]) / _deviation(total[6:]))
    evidence: dict[str, float] = {"tokens_low": float(low.sum())}
    if noise is None:
        return report_untestable(NAME, "no token has a probability between 0.1 and 0.9", **evidence)
    evidence |= {"noise": noise.value, "noise_low": noise.low, "noise_high": noise.high}
    if tail is not None:
        evidence |= {"tail": tail.value, "tail_low": tail.low}
    if noise.low <= THRESHOLDS.noise:
        return report_absent(
            NAME,
            f"for tokens with a probability between 0.1 and 0.9, the gap has a deviation of {noise.value:.2g} nats, "
            "which is normal for two engines in bfloat16",
            **evidence,
        )
    if tail is None or tail.low <= THRESHOLDS.tail:
        return report_absent(
            NAME, f"the gap of {noise.value:.2g} nats does not grow towards low probability", **evidence
        )
    return Cause(
        NAME,
        "present",
        evidence,
        f"the gap has no preferred sign; its deviation is {noise.value:.2g} nats [{noise.low:.2g}, {noise.high:.2g}] "
        f"at probabilities between 0.1 and 0.9, and {tail.value:.1f} times as large below 0.1 as above 0.5, so the "
        "engines compute with different precision",
        "give the engine the trainer's precision (actor_rollout_ref.rollout.dtype, and no quantised weights or cache); "
        f"{BATCH_INVARIANT}; or correct for the mismatch: 'correction=[tis_token,icepop]'",
    )


def _deviation(sums: Array) -> float:
    """Compute the standard deviation from sums of 1, x and x^2; NaN for fewer than two values."""
    count, first, second = sums
    return float(np.sqrt(max(second / count - (first / count) ** 2, 0.0))) if count >= 2 else float("nan")
