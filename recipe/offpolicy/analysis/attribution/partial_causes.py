"""Tests for causes that affect only some of the tokens: re-tokenised turns, and weights that differ from the trainer's.

Keys and values computed with older weights stay in an engine's prefix cache if the cache is not cleared when new
weights arrive. The engine uses them for repeated prompts but not for new prompts. This difference alone does not
distinguish a stale cache from older weights, because an update has the largest effect on the prompts that it was
trained on, which include the repeated prompts. However, older weights affect new prompts as well. A comparison of
weights at each synchronisation distinguishes undelivered weights from delivered weights that are stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...correction import recommended
from ...delivery.checksums import FIX_ROUNDED, LEAST_SEEN
from ...monitor.mismatch_shares import BINS
from .cause import LEAST_TOKENS, RETOKENISATION, STALE, THRESHOLDS, Array, Cause, Estimate, estimate, estimate_ratio
from .recorded_tokens import SampledTokens, number

Mask = NDArray[np.bool_]

FIX_WEIGHTS = (
    "synchronise at every step and clear the engine's cache; if staleness is intended, bound it with "
    f"trainer.v1.sampler.max_off_policy_threshold and correct for it: {recommended.LINE}"
)
_FIX_CACHE = (
    "clear the engine's prefix cache when new weights arrive, as verl does, or disable it: "
    "actor_rollout_ref.rollout.enable_prefix_caching=False"
)


def find_retokenisation(sampled: SampledTokens) -> tuple[Cause, Mask]:
    """Compare the KL of each turn with the KL of the cleanest turn, at equal probability under mu.

    Returns:
        The verdict, and a mask of the tokens in clean turns (all tokens unless the cause is present).
    """
    turn, everything = sampled.turn, np.ones(len(sampled), dtype=bool)
    if turn.max() < 1:
        return Cause(RETOKENISATION, "not testable", {}, "every row has only one turn"), everything
    means = {
        int(each): float(sampled.k3[turn == each].mean())
        for each in np.unique(turn)
        if (turn == each).sum() >= LEAST_TOKENS
    }
    if len(means) < 2:
        return Cause(RETOKENISATION, "not testable", {}, "fewer than two turns have enough tokens"), everything
    # The cleanest turn represents the effect of the backend alone.
    cleanest = min(means, key=lambda each: means[each])
    evidence = {**{f"kl_turn_{each}": value for each, value in means.items()}, "cleanest": cleanest}
    worse, clean = {}, turn == cleanest
    for each in means:
        factor = _compare_turns(sampled, each, cleanest) if each != cleanest else None
        if factor is None:
            continue
        evidence |= factor.name(f"factor_turn_{each}", "low")
        if factor.low > THRESHOLDS.turn_factor:
            worse[each] = factor.value
        else:
            clean |= turn == each
    if not worse:
        sentence = "all turns have about the same gap at equal probability"
        return Cause(RETOKENISATION, "absent", evidence, sentence), everything
    worst = max(worse, key=lambda each: worse[each])
    sentence = (
        f"in turn {' and '.join(str(each + 1) for each in sorted(worse))} the KL per token is up to "
        f"{worse[worst]:,.0f} times that of turn {cleanest + 1} at equal probability "
        f"({means[worst]:.2g} against {means[cleanest]:.2g} nats)"
    )
    fix = (
        "train on the token ids that the engine received and returned: never tokenize the text of a conversation again"
    )
    return Cause(RETOKENISATION, "present", evidence, sentence, fix), clean


def _compare_turns(sampled: SampledTokens, turn: int, cleanest: int) -> Estimate | None:
    """Estimate a turn's KL divided by the cleanest turn's KL at the same probabilities."""
    here, there = sampled.turn == turn, sampled.turn == cleanest
    chosen = here | there
    bins = sampled.probability == np.arange(len(BINS))[:, None]
    columns = np.concatenate([bins * column for part in (here, there) for column in (part, part * sampled.k3)])

    def ratio(sums: Array) -> float:
        count, total, clean_count, clean_total = sums.reshape(4, len(BINS))
        known = clean_count > 0
        # KL of the clean turn, reweighted to this turn's probabilities.
        expected = (count[known] * clean_total[known] / clean_count[known]).sum()
        return float(total[known].sum() / expected) if expected > 0 else float("nan")

    return estimate(columns[:, chosen], sampled.cluster[chosen], ratio)


def find_stale_weights(sampled: SampledTokens) -> tuple[Cause, Mask]:
    """Compare the KL of each step (or staleness) with the KL of the freshest, and repeated prompts with new prompts.

    Returns:
        The verdict, and a mask of the fresh tokens (all tokens unless the cause is present).
    """
    again = sampled.again > 0
    kept, of_prompts = _compare_prompts(sampled, again)
    cause, fresh = _compare_weights(sampled)
    cause = replace(cause, evidence={**cause.evidence, **of_prompts})
    if kept is None:
        told_apart = _explain_missing_comparison(sampled)
    else:
        of_new, fresh_new = _compare_weights(sampled.take(~again))
        if kept.low > THRESHOLDS.growth and of_new.verdict != "present":
            fresh = ~again
            fresh[fresh] = fresh_new
            return _report_cache(kept, cause.evidence, alone=of_new.verdict == "absent"), fresh
        told_apart = f"; repeated prompts have {kept.value:.1f} times the KL of new ones"
        if kept.high < THRESHOLDS.growth:
            told_apart += ", so the weights are stale"
        elif of_new.verdict == "present":
            told_apart += ": the weights are stale, because new prompts are affected too; the cache may also be stale"
        else:
            told_apart += ", which does not show whether the weights or the cache are stale"
    if cause.verdict == "present":
        cause = replace(cause, sentence=cause.sentence + told_apart)
    return cause, fresh


def _report_cache(kept: Estimate, evidence: Mapping[str, float], *, alone: bool) -> Cause:
    """Build the verdict on repeated prompts; ``alone``: whether new prompts are as fresh as in the freshest step."""
    found = (
        f"in the same steps and at equal probability, rows with a repeated prompt have {kept.value:,.0f} times the KL "
        f"of rows with a new prompt ({evidence['kl_again']:.2g} against {evidence['kl_new']:.2g} nats per token), and"
    )
    if alone:
        which = "new prompts are fresh, so the engine's prefix cache holds keys and values computed with older weights"
        return Cause(STALE, "present", evidence, f"{found} {which}", _FIX_CACHE)
    which = "there are too few new prompts to tell whether the engine has older weights, or only an older cache"
    return Cause(STALE, "present", evidence, f"{found} {which}", FIX_WEIGHTS)


def _compare_prompts(sampled: SampledTokens, again: Mask) -> tuple[Estimate | None, Mapping[str, float]]:
    """Estimate KL of rows with repeated prompts divided by KL of rows with new prompts; also return the evidence.

    Only rows of the same step are compared, at the same staleness and the same probability under mu. Therefore, neither
    the age of a step nor the certainty of its tokens affects the result. A prompt that occurred before but was not
    recorded counts as new, which makes the factor smaller. The result is None if the repeated or the new rows have
    fewer than ``LEAST_TOKENS`` tokens to compare.
    """
    new, loss = sampled.again == 0, sampled.k3
    # Strata with only one kind of row do not allow a comparison.
    ages = sampled.staleness.max(initial=0) + 2
    stratum = number((sampled.step * ages + sampled.staleness) * len(BINS) + sampled.probability)
    counts = [np.bincount(stratum[chosen], minlength=stratum.max() + 1) for chosen in (again, new)]
    shared = ((counts[0] > 0) & (counts[1] > 0))[stratum]
    again, new = again & shared, new & shared
    if min(again.sum(), new.sum()) < LEAST_TOKENS:
        return None, {}
    # New rows are weighted to the same distribution over steps and probabilities as the repeated rows.
    scale = (counts[0] / np.maximum(counts[1], 1))[stratum]
    chosen = again | new
    factor = estimate_ratio((again * loss)[chosen], (new * scale * loss)[chosen], sampled.cluster[chosen])
    if factor is None:
        return None, {}
    means = {"kl_again": float(loss[again].mean()), "kl_new": float((scale * loss)[new].sum() / again.sum())}
    return factor, {**means, **factor.name("again", "low", "high")}


def _explain_missing_comparison(sampled: SampledTokens) -> str:
    """Explain which data are missing to tell stale weights from a stale cache; empty if versions were recorded."""
    if (sampled.staleness > 0).any():
        return ""
    return (
        "; to find out whether the weights or the cache are stale, record prompts; new prompts are needed alongside "
        "repeated ones"
    )


def _compare_weights(sampled: SampledTokens) -> tuple[Cause, Mask]:
    """Compare the KL of each step, or of each staleness if known, with that of the freshest step or staleness."""
    everything, loss = np.ones(len(sampled), dtype=bool), sampled.k3
    fresh, stale = sampled.staleness == 0, sampled.staleness > 0
    by_version = stale.any() and fresh.sum() >= LEAST_TOKENS
    part, least = (sampled.staleness, 1) if by_version else (sampled.step, LEAST_TOKENS)
    numbers = [int(each) for each in np.unique(part) if each >= 0 and (part == each).sum() >= least]
    if len(numbers) < 2:
        return Cause(STALE, "not testable", {}, f"fewer than two steps have {LEAST_TOKENS} tokens"), everything
    series = {each: float(loss[part == each].mean()) for each in numbers}
    freshest, worst = min(numbers, key=lambda each: series[each]), max(numbers, key=lambda each: series[each])
    evidence = {f"kl_{'staleness' if by_version else 'step'}_{each}": value for each, value in series.items()}
    if by_version:
        here, there, agreeing, grows = stale, fresh, "on fresh rows", True
    else:
        here, there, agreeing = part == worst, part == freshest, "at some step"
        pairs = list(pairwise(series.values()))
        rises, falls = sum(b > 1.5 * a for a, b in pairs), sum(b < 0.5 * a for a, b in pairs)
        evidence |= {"rises": float(rises), "resets": float(falls)}
        grows = worst >= freshest or falls > 0
        # Steps within twice the smallest KL count as fresh in the tests that follow.
        fresh = np.isin(part, [each for each in numbers if series[each] < 2 * series[freshest]])
    chosen = here | there
    columns = [column[chosen] for column in (here, here * loss, there, there * loss)]
    factor = estimate(columns, sampled.cluster[chosen], lambda sums: float(sums[1] / sums[0] / (sums[3] / sums[2])))
    if factor is None:
        return Cause(STALE, "not testable", evidence, f"both policies agree bit for bit {agreeing}"), everything
    evidence |= factor.name("growth", "low", "high")
    present = factor.low > THRESHOLDS.growth and grows
    if by_version and present:
        oldest = int(sampled.staleness.max())
        sentence = (
            f"rows sampled by weights that were up to {oldest} step{'s' * (oldest > 1)} older have {factor.value:.0f} "
            f"times the KL of fresh rows: {loss[stale].mean():.2g} against {loss[fresh].mean():.2g} nats per token"
        )
    elif by_version:
        sentence = f"stale rows have {factor.value:.1f} times the KL of fresh rows"
    elif present:
        sentence = (
            f"the KL per token grows from {series[freshest]:.2g} nats at step {freshest} to {series[worst]:.2g} at "
            f"step {worst} ({factor.value:.0f} times) and falls back {falls} times: the engine does not sample with "
            "the trainer's weights"
        )
    else:
        sentence = f"the KL per step varies by a factor of at most {factor.value:.1f} and never resets"
    if not present:
        return Cause(STALE, "absent", evidence, sentence), everything
    return Cause(STALE, "present", evidence, sentence, FIX_WEIGHTS), fresh


UNDELIVERED, ROUNDED = "weights not delivered", "updates rounded away"


def judge_delivery(lines: Sequence[Mapping[str, Any]]) -> list[Cause]:
    """Decide on both delivery causes from a run's synchronisation records; the result is empty if there are no records.

    Args:
        lines: for each synchronisation, ``step``, ``verdict`` (``equal`` or what was wrong), ``sentence``, and
            ``along`` and ``square`` of the update.
    """
    if not lines:
        return []
    wrong = [line for line in lines if line["verdict"] != "equal"]
    evidence = {"synchronisations": float(len(wrong))}
    if wrong:
        sentence = (
            f"at {len(wrong)} of {len(lines)} synchronisations the engine did not have the trainer's weights; "
            f"step {wrong[0]['step']}: {wrong[0]['sentence']}"
        )
    else:
        sentence = f"the engine had the trainer's weights at each of {len(lines)} synchronisations"
    delivered = Cause(UNDELIVERED, "present" if wrong else "absent", evidence, sentence)
    along, square = (sum(float(line.get(name, 0.0)) for line in lines) for name in ("along", "square"))
    if not square > 0:
        return [delivered, Cause(ROUNDED, "not testable", {}, "no update between two synchronisations was recorded")]
    seen = along / square
    sentence = f"the engine's dtype preserves {seen:.2g} of the trainer's updates"
    if seen >= LEAST_SEEN:
        return [delivered, Cause(ROUNDED, "absent", {"seen": seen}, sentence)]
    return [delivered, Cause(ROUNDED, "present", {"seen": seen}, f"{sentence}: its weights are older", FIX_ROUNDED)]


def withdraw_staleness(delivery: Sequence[Cause], causes: Sequence[Cause], *, stale: bool) -> list[Cause]:
    """Withdraw a verdict of stale weights if updates lost to rounding explain it.

    Updates that the engine's dtype rounds away make the KL grow from step to step, just as older weights do. If all
    weights were delivered and no token is recorded as ``stale``, the growth is therefore not a sign of older weights.

    Args:
        delivery: the verdicts of ``judge_delivery``.
    """
    verdicts = {cause.name: cause.verdict for cause in delivery}
    if stale or verdicts.get(UNDELIVERED) != "absent" or verdicts.get(ROUNDED) != "present":
        return list(causes)
    why = "the KL grows as it would if updates were rounded away, and all weights were delivered"
    return [
        Cause(cause.name, "not testable", cause.evidence, why) if cause.fix == FIX_WEIGHTS else cause
        for cause in causes
    ]
