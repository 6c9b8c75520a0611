"""Stale-weights test: whether the gap grows from step to step and shrinks again at a synchronisation.

Keys and values of older weights stay in an engine's prefix cache if the cache is not cleared when new weights arrive.
The engine uses them for repeated prompts but not for new prompts. This difference alone does not distinguish a stale
cache from older weights, because an update has the largest effect on the prompts that it was trained on, which include
the repeated prompts. However, older weights affect new prompts as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ....correction import recommended
from ....monitor.mismatch.shares import BINS
from ..frames import compute_k3
from .cause import LEAST_TOKENS, THRESHOLDS, Cause, report_absent, report_untestable
from .sampled_tokens import Array, Estimate, SampledTokens, estimate, number, sum_by_cluster

NAME = "stale weights"
FIX_WEIGHTS = (
    "synchronise at every step and clear the engine's cache; if staleness is intended, bound it with "
    f"trainer.v1.sampler.max_off_policy_threshold and correct for it: {recommended.LINE}"
)
_FIX_CACHE = (
    "clear the engine's prefix cache when new weights arrive, as verl does, or disable it: "
    "actor_rollout_ref.rollout.enable_prefix_caching=False"
)

Mask = NDArray[np.bool_]


def find(sampled: SampledTokens) -> tuple[Cause, Mask]:
    """Compare the KL of each step (or staleness) with the KL of the freshest, and repeated prompts with new prompts.

    Returns:
        The verdict, and a mask of the fresh tokens (all tokens unless the cause is present).
    """
    again = sampled.again > 0
    kept, of_prompts = _kept(sampled, again)
    cause, fresh = _of_weights(sampled)
    evidence = {**cause.evidence, **of_prompts}
    told_apart = _without_comparison(sampled, again)
    if kept is not None:
        of_new, fresh_new = _of_weights(sampled.take(~again))
        if kept.low > THRESHOLDS.growth and of_new.verdict != "present":
            fresh = ~again
            fresh[fresh] = fresh_new
            return _of_cache(kept, evidence, alone=of_new.verdict == "absent"), fresh
        told_apart = _of_both(kept, new_are_stale=of_new.verdict == "present")
    if cause.verdict == "present":
        return replace(cause, evidence=evidence, sentence=f"{cause.sentence}{told_apart}"), fresh
    return replace(cause, evidence=evidence), fresh


def _of_cache(kept: Estimate, evidence: Mapping[str, float], *, alone: bool) -> Cause:
    """Build the verdict on repeated prompts; ``alone``: whether new prompts are as fresh as the freshest step's."""
    which = (
        "and new prompts are fresh, so the engine's prefix cache holds keys and values computed with older weights"
        if alone
        else "and there are too few new prompts to tell whether the engine has older weights, or only keys and values "
        "computed with them"
    )
    return Cause(
        NAME,
        "present",
        evidence,
        f"in the same steps and at equal probability, rows with a repeated prompt have {kept.value:,.0f} times the KL "
        f"of rows with a new prompt ({evidence['kl_again']:.2g} against {evidence['kl_new']:.2g} nats per token), "
        f"{which}",
        _FIX_CACHE if alone else FIX_WEIGHTS,
    )


def _kept(sampled: SampledTokens, again: Mask) -> tuple[Estimate | None, Mapping[str, float]]:
    """Estimate KL of rows with repeated prompts divided by KL of rows with new prompts; also return the evidence.

    Only rows of the same step are compared, at the same staleness and the same probability under mu. Therefore, neither
    the age of a step nor the certainty of its tokens affects the result. A prompt that occurred before but was not
    recorded counts as new, which makes the factor smaller. The result is None if the repeated or the new rows have
    fewer than ``LEAST_TOKENS`` tokens to compare.
    """
    new = sampled.again == 0
    loss = compute_k3(sampled.tokens.gap)
    # Strata with only one kind of row do not allow a comparison.
    ages = sampled.staleness.max(initial=0) + 2
    stratum = number((sampled.step * ages + sampled.staleness) * len(BINS) + sampled.tokens.probability)
    counts = [np.bincount(stratum[chosen], minlength=stratum.max() + 1) for chosen in (again, new)]
    shared = ((counts[0] > 0) & (counts[1] > 0))[stratum]
    again, new = again & shared, new & shared
    if min(again.sum(), new.sum()) < LEAST_TOKENS:
        return None, {}
    # New rows are weighted to the same distribution over steps and probabilities as the repeated rows.
    scale = (counts[0] / np.maximum(counts[1], 1))[stratum]
    chosen = again | new
    columns = (column[chosen] for column in (again * loss, new * scale * loss))
    factor = estimate(sum_by_cluster(columns, sampled.cluster[chosen]), lambda sums: float(sums[0] / sums[1]))
    if factor is None:
        return None, {}
    evidence = {
        "kl_again": float(loss[again].mean()),
        "kl_new": float((scale * loss)[new].sum() / again.sum()),
        "again": factor.value,
        "again_low": factor.low,
        "again_high": factor.high,
    }
    return factor, evidence


def _of_both(kept: Estimate, *, new_are_stale: bool) -> str:
    """Describe whether weights or cache are stale, for a run whose repeated and new prompts were compared."""
    ratio = f"; repeated prompts have {kept.value:.1f} times the KL of new ones"
    if kept.high < THRESHOLDS.growth:
        return f"{ratio}, so the weights are stale"
    if new_are_stale:
        return (
            f"{ratio}: the weights are stale, because new prompts are affected too and training changes repeated "
            "prompts most; the cache may be stale as well"
        )
    return f"{ratio}, which does not show whether the weights or the cache are stale"


def _without_comparison(sampled: SampledTokens, again: Mask) -> str:
    """Describe whether the weights or the cache are stale, for a run whose prompts could not be compared."""
    if (sampled.staleness > 0).any():
        return ""  # recorded versions identify the weights
    if (sampled.again < 0).any():
        return "; record the prompts to find out whether the weights or the cache are stale"
    if again.sum() < LEAST_TOKENS:
        return (
            "; every step has new prompts, so either the weights are stale, or the cache of a text that the prompts "
            "share"
        )
    return "; to find out whether the weights or the cache are stale, new prompts are needed alongside repeated ones"


def _of_weights(sampled: SampledTokens) -> tuple[Cause, Mask]:
    """Compare the KL of each step, or of each staleness if known, with that of the freshest step or staleness."""
    everything = np.ones(len(sampled), dtype=bool)
    if (sampled.staleness > 0).any() and (sampled.staleness == 0).sum() >= LEAST_TOKENS:
        return _by_version(sampled)
    loss = compute_k3(sampled.tokens.gap)
    steps = [int(step) for step in np.unique(sampled.step) if (sampled.step == step).sum() >= LEAST_TOKENS]
    if len(steps) < 2:
        return report_untestable(NAME, f"fewer than two steps have {LEAST_TOKENS} tokens"), everything
    series = {step: float(loss[sampled.step == step].mean()) for step in steps}
    freshest = min(steps, key=lambda step: series[step])
    worst = max(steps, key=lambda step: series[step])
    factor = _factor(sampled, sampled.step == worst, sampled.step == freshest)
    grows, falls = _shape([series[step] for step in steps])
    evidence = {f"kl_step_{step}": value for step, value in series.items()}
    evidence |= {"rises": float(grows), "resets": float(falls)}
    if factor is None:
        return report_untestable(NAME, "both policies agree bit for bit at some step", **evidence), everything
    evidence |= {"growth": factor.value, "growth_low": factor.low, "growth_high": factor.high}
    if factor.low <= THRESHOLDS.growth or (worst < freshest and not falls):
        return (
            report_absent(
                NAME, f"the KL of steps differs by a factor of {factor.value:.1f} at most, without resets", **evidence
            ),
            everything,
        )
    # Steps within twice the smallest KL count as fresh in the tests that follow.
    fresh = np.isin(sampled.step, [step for step in steps if series[step] < 2 * series[freshest]])
    return (
        Cause(
            NAME,
            "present",
            evidence,
            f"the KL per token grows from {series[freshest]:.2g} nats at step {freshest} to {series[worst]:.2g} at "
            f"step {worst}, by a factor of {factor.value:.0f}, and falls back {falls} times: the engine does not "
            f"sample with the trainer's weights",
            FIX_WEIGHTS,
        ),
        fresh,
    )


def _by_version(sampled: SampledTokens) -> tuple[Cause, Mask]:
    """Compare the KL of stale rows with the KL of fresh rows."""
    fresh = sampled.staleness == 0
    stale = sampled.staleness > 0
    everything = np.ones(len(sampled), dtype=bool)
    factor = _factor(sampled, stale, fresh)
    loss = compute_k3(sampled.tokens.gap)
    oldest = int(sampled.staleness.max())
    evidence = {
        f"kl_staleness_{age}": float(loss[sampled.staleness == age].mean())
        for age in range(oldest + 1)
        if (sampled.staleness == age).any()
    }
    if factor is None:
        return report_untestable(NAME, "both policies agree bit for bit on fresh rows", **evidence), everything
    evidence |= {"growth": factor.value, "growth_low": factor.low, "growth_high": factor.high}
    if factor.low <= THRESHOLDS.growth:
        return (
            report_absent(NAME, f"stale rows have {factor.value:.1f} times the KL of fresh rows", **evidence),
            everything,
        )
    return (
        Cause(
            NAME,
            "present",
            evidence,
            f"rows sampled by weights that were up to {oldest} step{'s' * (oldest > 1)} older have {factor.value:.0f} "
            f"times the KL of fresh rows: {loss[stale].mean():.2g} against {loss[fresh].mean():.2g} nats per token",
            FIX_WEIGHTS,
        ),
        fresh,
    )


def _factor(sampled: SampledTokens, here: Mask, there: Mask) -> Estimate | None:
    """Estimate the ratio of the mean KLs of two sets of tokens."""
    loss = compute_k3(sampled.tokens.gap)
    chosen = here | there
    columns = (column[chosen] for column in (here, here * loss, there, there * loss))

    def ratio(sums: Array) -> float:
        return float((sums[1] / sums[0]) / (sums[3] / sums[2]))

    return estimate(sum_by_cluster(columns, sampled.cluster[chosen]), ratio)


def _shape(series: list[float]) -> tuple[int, int]:
    """Count how often the series rises by at least half, and how often it falls to less than half."""
    pairs = list(pairwise(series))
    return sum(b > 1.5 * a for a, b in pairs), sum(b < 0.5 * a for a, b in pairs)
