"""Truncation test: whether sampling from a subset of tokens, or from a larger vocabulary, offsets log mu by a constant.

If mu keeps a set K of the tokens, then mu = pi_old / pi_old(K) on K, and log mu - log pi_old = -log pi_old(K) >= 0, the
same for all tokens of a context. Since E_mu[pi_old / mu] = pi_old(K), one minus this mean is the mass that was cut off.
For any other cause that leaves every token possible, the mean is 1 if enough tokens are drawn. With noise of more than
a nat, the ratio has a tail that few samples reach, so the sample mean is below 1. However, such noise also puts pi_old
above mu at some tokens by about the same amount, whereas truncated sampling never does.

Truncated sampling and a padded vocabulary differ in what was cut off. Top-p, top-k and min-p leave few tokens.
Sometimes a group's rows have sampled every one of these tokens. Their probabilities under mu then sum to 1, those under
pi_old do not, and nothing else can cause this. A padded vocabulary leaves all real tokens. A top-k larger than the
number of rows in a group cannot be detected in this way, so the run's card decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cause import LEAST_TOKENS, THRESHOLDS, Cause, report_absent, report_untestable
from .sampled_tokens import Estimate, SampledTokens, estimate, sum_by_cluster, sum_probabilities

TRUNCATED, EXTRA = "truncated sampling", "extra vocabulary"
WHOLE = 1e-4
"""Largest distance from 1 at which a sum of probabilities still counts as 1."""
SHORT = 1e-2
"""Minimum mass that pi_old must assign to other tokens for a context to count."""


@dataclass(frozen=True)
class Offset:
    """Estimates of the constant by which log mu lies above log pi_old.

    Attributes:
        missing: total probability, under pi_old, of the tokens that mu excludes.
        one_sided: share of the squared gap that comes from tokens where mu is larger.
        above: root mean squared gap, in nats, over the tokens where pi_old is larger; None if there are no such tokens.
        exhausted: among the contexts whose sampled tokens leave out at least ``SHORT`` of pi_old's mass, share of those
            whose sampled tokens are all that mu allows.
        contexts: number of contexts whose sampled tokens are all that mu allows, but not all that pi_old allows.
    """

    missing: Estimate
    one_sided: Estimate
    above: Estimate | None
    exhausted: Estimate
    contexts: int


def _measure_offset(sampled: SampledTokens) -> Offset | None:
    """Estimate the offset; None if both policies agree bit for bit."""
    gap = sampled.tokens.gap
    larger_mu, larger_old = np.square(np.minimum(gap, 0.0)), np.square(np.maximum(gap, 0.0))
    columns = (np.ones_like(gap), -np.expm1(np.clip(gap, -20, 20)), larger_mu, gap * gap, gap > 0, larger_old)
    sums = sum_by_cluster(columns, sampled.cluster)
    missing = estimate(sums, lambda total: float(total[1] / total[0]))
    one_sided = estimate(sums, lambda total: float(total[2] / total[3]))
    above = estimate(sums, lambda total: float(np.sqrt(total[5] / total[4])))
    support = sum_probabilities(sampled)
    # Only contexts whose sampled tokens contain all of mu's mass, but not all of pi_old's, show truncation.
    short = support.old < 1.0 - SHORT
    whole = short & (support.mu > 1.0 - WHOLE)
    counted = sum_by_cluster((short, whole), support.cluster)
    exhausted = estimate(counted, lambda total: float(total[1] / total[0]))
    if missing is None or one_sided is None or exhausted is None:
        return None
    return Offset(missing, one_sided, above, exhausted, int(whole.sum()))


def find(sampled: SampledTokens, sampling: Mapping[str, Any]) -> tuple[Cause, Cause]:
    """Decide whether truncated sampling or extra vocabulary is present.

    Args:
        sampling: sampling settings in the card, such as ``top_p``; empty if there are none.
    """
    if sampling.get("support") == "engine" and sampling.get("support_unknown") == "mask":
        why = "the run's card says that pi_old was renormalised over the support from which the engine sampled"
        return report_absent(TRUNCATED, why), report_absent(EXTRA, why)
    if len(sampled) < LEAST_TOKENS:
        why = f"fewer than {LEAST_TOKENS} tokens are left for the test"
        return report_untestable(TRUNCATED, why), report_untestable(EXTRA, why)
    offset = _measure_offset(sampled)
    if offset is None:
        why = "both policies agree bit for bit"
        return report_absent(TRUNCATED, why), report_absent(EXTRA, why)
    missing, one_sided, exhausted = offset.missing, offset.one_sided, offset.exhausted
    if missing.value < -1.0:
        # If a mean ratio is above 2, one minus the ratio cannot be a mass.
        ratio = {"mean_ratio": 1.0 - missing.value, "one_sided": one_sided.value}
        why = (
            f"the mean of pi_old/mu over mu's samples is {1.0 - missing.value:.2g}, but it would be below 1 if mass "
            "were cut off"
        )
        return report_absent(TRUNCATED, why, **ratio), report_absent(EXTRA, why, **ratio)
    evidence = {
        "missing": missing.value,
        "missing_low": max(missing.low, -1.0),
        "missing_high": missing.high,
        "one_sided": one_sided.value,
        "one_sided_low": one_sided.low,
        "exhausted": exhausted.value,
        "exhausted_low": exhausted.low,
        "exhausted_contexts": offset.contexts,
    }
    if missing.low <= THRESHOLDS.missing or one_sided.low <= THRESHOLDS.one_sided:
        why = (
            f"mu has cut off {missing.value:.2%} of pi_old's mass, and tokens at which mu is larger make up "
            f"{one_sided.value:.0%} of the squared gap"
        )
        return report_absent(TRUNCATED, why, **evidence), report_absent(EXTRA, why, **evidence)
    above = offset.above
    if above is not None:
        evidence |= {"above": above.value, "above_high": above.high}
    if above is not None and above.high > THRESHOLDS.above:
        why = (
            f"where pi_old exceeds mu, it does so by {above.value:.2g} nats, which cutting off mass cannot cause; "
            "with such scatter, the mean of pi_old / mu over these tokens does not measure the mass that is missing"
        )
        return report_absent(TRUNCATED, why, **evidence), report_absent(EXTRA, why, **evidence)
    constant = (
        f"tokens at which mu is larger than pi_old make up {one_sided.value:.0%} of the squared gap, as if "
        f"{missing.value:.2%} [{missing.low:.2%}, {missing.high:.2%}] of the mass were cut off"
    )
    exhausts = offset.contexts >= THRESHOLDS.exhausted
    if exhausts or _restricted(sampling):
        by_what = (
            f"in {offset.contexts} contexts the sampled tokens are all that mu allows, but not all that pi_old allows"
            if exhausts
            else f"the run's card says {_restricted(sampling)}"
        )
        return (
            Cause(
                TRUNCATED,
                "present",
                evidence,
                f"{constant}; {by_what}",
                "actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1, and no min_p",
            ),
            report_absent(EXTRA, "the tokens that were cut off have a nonzero probability in the trainer", **evidence),
        )
    return (
        report_absent(
            TRUNCATED, f"the sampled tokens hold all of mu's mass in only {offset.contexts} contexts", **evidence
        ),
        Cause(
            EXTRA,
            "present",
            evidence,
            f"{constant}, and no token that could be sampled is missing, so the engine masks ids that the trainer "
            "counts",
            "cut the output layer to the tokenizer's size, or mask the same ids in the trainer: config.vocab_size must "
            "equal len(tokenizer)",
        ),
    )


def _restricted(sampling: Mapping[str, Any]) -> str:
    """Format the sampling settings that exclude tokens; empty if there are none."""
    found = []
    for key, whole in (("top_p", lambda v: v >= 1), ("top_k", lambda v: v <= 0), ("min_p", lambda v: v <= 0)):
        value = sampling.get(key)
        if isinstance(value, (int, float)) and not whole(value):
            found.append(f"{key}={value:g}")
    return ", ".join(found)
