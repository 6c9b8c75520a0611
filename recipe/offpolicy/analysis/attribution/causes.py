"""Search for the causes of a mismatch between mu and pi_old: a sequence of tests over recorded tokens.

Misalignment is tested first, because log-probs that belong to the wrong tokens invalidate all other tests. Re-tokenised
turns and stale steps are then excluded, so that the remaining tests cover only the backend: temperature, truncated
sampling, extra vocabulary and numerics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...correction.recommended import BATCH_INVARIANT
from ...recording import Rows
from .cause import (
    EXTRA,
    LEAST_CONTEXTS,
    LEAST_TOKENS,
    MISALIGNMENT,
    NAMES,
    NUMERICS,
    TEMPERATURE,
    THRESHOLDS,
    TRUNCATED,
    Array,
    Cause,
    Verdict,
    estimate,
    estimate_ratio,
    report_untestable,
)
from .partial_causes import find_retokenisation, find_stale_weights
from .recorded_tokens import SampledTokens, center_within_contexts, collect_tokens, compute_k3, sum_probabilities


def find_causes(rows: Rows, card: Mapping[str, Any]) -> list[Cause]:
    """Decide for every cause of ``NAMES``, in that order, whether it is present.

    Args:
        rows: rows with log pi_old under the trainer's own weights.
        card: the recording's card, which contains the sampling settings; it may be empty.
    """
    sampled = collect_tokens(rows)
    if len(sampled) < LEAST_TOKENS:
        return report_untestable(NAMES, f"only {len(sampled)} tokens are recorded, and {LEAST_TOKENS} are needed")
    # Two engines never agree bit for bit on this many tokens.
    if np.array_equal(sampled.mu, sampled.old):
        correction = card.get("correction")
        why = "one may be a copy of the other. Record with correction.proximal=recompute"
        if isinstance(correction, dict) and correction.get("proximal") == "same_engine":
            why = "there is nothing to explain, as with correction.proximal=same_engine"
        return report_untestable(NAMES, f"mu equals pi_old bit for bit: {why}")
    misaligned = find_misalignment(sampled)
    if misaligned.verdict == "present":
        return [misaligned, *report_untestable(NAMES[1:], "not tested: log mu belongs to other tokens")]
    of_turns, clean = find_retokenisation(sampled)
    sampled = sampled.take(clean)
    of_steps, fresh = find_stale_weights(sampled)
    sampled = sampled.take(fresh)
    known = card.get("sampling")
    sampling = known if isinstance(known, dict) else {}
    found = [misaligned, of_turns, of_steps, find_temperature(sampled, sampling)]
    if found[-1].verdict == "present":
        why = "not distinguishable from a difference in temperature: fix the temperature first"
        return [*found, *report_untestable((TRUNCATED, EXTRA, NUMERICS), why)]
    truncated, extra = find_truncation(sampled, sampling)
    # A constant offset per context would look like noise, so the numerics test then uses only the variation within
    # contexts.
    offset = "present" in (truncated.verdict, extra.verdict)
    return [*found, truncated, extra, find_numerics(sampled, offset=offset)]


LOWEST = -15.0
"""Log-probs are clamped at this value in correlations, so that no single token determines the result."""


def find_misalignment(sampled: SampledTokens) -> Cause:
    """Test how log pi_old correlates with log mu of the same token and with that of adjacent tokens in the row."""
    columns = {lag: _collect_correlation_terms(sampled, lag) for lag in (-1, 0, 1)}
    shifted = _find_shift(sampled, columns)
    if shifted.verdict == "present":
        return shifted
    return _find_unrelated(sampled, columns[0], shifted.evidence) or shifted


def _find_shift(sampled: SampledTokens, columns: Mapping[int, Array]) -> Cause:
    """Test whether the correlation is higher with a shift of one token than without a shift."""
    if min(of_lag[0].sum() for of_lag in columns.values()) < LEAST_TOKENS:
        return Cause(MISALIGNMENT, "not testable", {}, f"fewer than {LEAST_TOKENS} tokens have an adjacent token")
    values = {lag: _correlate(of_lag.sum(-1)) for lag, of_lag in columns.items()}
    best = max((-1, 1), key=lambda lag: values[lag])
    evidence = {f"correlation_{lag}": value for lag, value in values.items()}
    # Both correlations are computed from one table, so that each bootstrap draw resamples them together.
    table = [*columns[0], *columns[best]]
    better = estimate(table, sampled.cluster, lambda sums: _correlate(sums[6:]) - _correlate(sums[:6]))
    if better is None:
        return Cause(MISALIGNMENT, "not testable", evidence, "all log-probs are alike")
    evidence |= {"better_beside": better.value, "better_low": better.low, "better_high": better.high}
    if better.low <= THRESHOLDS.shift:
        sentence = f"log pi_old correlates with log mu of the same token ({values[0]:.2f}; adjacent {values[best]:.2f})"
        return Cause(MISALIGNMENT, "absent", evidence, sentence)
    side = "before" if best == 1 else "after"
    sentence = (
        f"log mu belongs to the token {side}: the correlation is {values[best]:.2f} with this shift and "
        f"{values[0]:.2f} without it"
    )
    fix = "fix the slicing in the code that computes mu: mu of token t is the log-prob at position t - 1 of the logits"
    return Cause(MISALIGNMENT, "present", evidence, sentence, fix)


def _find_unrelated(sampled: SampledTokens, columns: Array, evidence: Mapping[str, float]) -> Cause | None:
    """Test whether log mu and log pi_old are uncorrelated everywhere; None if they correlate or the test cannot tell.

    A correlation in even one step or turn points to staleness or re-tokenisation in the other steps or turns.
    """
    gap = sampled.gap
    here = estimate(columns, sampled.cluster, _correlate)
    # An offset that all tokens share does not show to which token a log-prob belongs.
    mismatch = estimate_ratio(compute_k3(gap - gap.mean()), np.ones_like(gap), sampled.cluster)
    if here is None or here.high >= THRESHOLDS.related or mismatch is None or mismatch.low <= THRESHOLDS.healthy:
        return None
    for part in (sampled.step, sampled.turn):
        for number in np.unique(part):
            chosen = part == number
            if chosen.sum() >= LEAST_TOKENS and _correlate(columns[:, chosen].sum(-1)) >= THRESHOLDS.part_related:
                return None
    sentence = (
        f"log mu is unrelated to log pi_old: their correlation is {here.value:.2f} [{here.low:.2f}, {here.high:.2f}], "
        f"and the KL is {sampled.k3.mean():.2g} nats per token"
    )
    fix = "find out where mu is joined to the wrong rows, or where it is computed with entirely different weights"
    return Cause(MISALIGNMENT, "present", {**evidence, **here.name("correlation_0", "low", "high")}, sentence, fix)


def _collect_correlation_terms(sampled: SampledTokens, lag: int) -> Array:
    """Stack the terms of the correlation of log pi_old with log mu ``lag`` tokens later, (6, n).

    The terms are 1, x, y, x^2, y^2, x y, and 0 for tokens without such a neighbour in their row.
    """
    # With the margin of 3, neighbours before the first and after the last position do not coincide with other rows.
    key = sampled.row * (sampled.place.max() + 3) + sampled.place
    there = np.minimum(np.searchsorted(key, key + lag), len(key) - 1)
    x, y = np.maximum(sampled.old, LOWEST), np.maximum(sampled.mu[there], LOWEST)
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y]) * (key[there] == key + lag)


def _correlate(sums: Array) -> float:
    """Compute Pearson's correlation from sums of ``_collect_correlation_terms``; NaN for a constant."""
    _, x, y, xx, yy, xy = sums / max(sums[0], 1.0)
    spread = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
    return float((xy - x * y) / np.sqrt(spread)) if spread > 0 else float("nan")


def find_temperature(sampled: SampledTokens, sampling: Mapping[str, Any]) -> Cause:
    """Test whether, within a context, log mu is a multiple of log pi_old plus a constant.

    With logits z, log mu = z / T_mu - log Z_mu and log pi_old = z / T_pi - log Z_pi. Over the tokens of one context,
    the slope of log mu on log pi_old is therefore T_pi / T_mu, which is positive for any distribution.

    Args:
        sampling: sampling settings in the card, such as ``temperature``; empty if there are none.
    """
    contexts, index, y, x = center_within_contexts(sampled)
    evidence: dict[str, float] = {"contexts": contexts}
    if contexts < LEAST_CONTEXTS:
        why = f"only {contexts} contexts have two tokens, but {LEAST_CONTEXTS} are needed: set rollout.n to 2 or more"
        return Cause(TEMPERATURE, "not testable", evidence, why)
    cluster = sampled.cluster[index]
    slope = estimate_ratio(x * y, x * x, cluster)
    # Share of the squared gap within contexts that is linear in log pi_old, and R^2 of log mu on log pi_old.
    explained, fit = (
        estimate((x * x, of * x, of * of), cluster, lambda sums: float(sums[1] ** 2 / (sums[0] * sums[2])))
        for of in (y - x, y)
    )
    if slope is None or explained is None or fit is None:
        return Cause(TEMPERATURE, "not testable", evidence, "both policies agree bit for bit")
    evidence |= slope.name("slope", "low", "high") | explained.name("explained", "low") | fit.name("fit", "low")
    # Distance of the interval from 1; negative if the interval contains 1.
    distance = max(slope.low - 1.0, 1.0 - slope.high)
    interval = f"[{slope.low:.3f}, {slope.high:.3f}]"
    sentence = f"within a context, log mu is linear in log pi_old, with slope {slope.value:.3f} {interval}"
    explains = f"which explains {explained.value:.0%} of the gap"
    if distance <= THRESHOLDS.slope or explained.low <= THRESHOLDS.slope_explains:
        return Cause(TEMPERATURE, "absent", evidence, f"{sentence}, {explains}")
    if slope.low <= 0.0 or fit.low <= THRESHOLDS.slope_fits:
        sentence += f" with an R^2 of {fit.value:.2f}, which no temperature can explain"
        return Cause(TEMPERATURE, "absent", evidence, sentence)
    sentence += f", {explains}: mu was computed at {1 / slope.value:.3f} times the trainer's temperature"
    known = sampling.get("temperature")
    # The override with which the trainer scores at the sampling temperature of the run.
    same = (
        f"actor_rollout_ref.rollout.temperature={float(known)!r}"
        if isinstance(known, int | float) and known > 0
        else "actor_rollout_ref.rollout.temperature set to the temperature at which the engine samples, and"
    )
    fix = (
        "use the same temperature for both engines, and let the engine return log-probs after the temperature is "
        f"applied: {same} actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
    )
    return Cause(TEMPERATURE, "present", evidence, sentence, fix)


WHOLE, SHORT = 1e-4, 1e-2
"""Largest distance from 1 at which a sum of probabilities still counts as 1, and minimum mass that pi_old must assign
to other tokens for a context to count."""


def find_truncation(sampled: SampledTokens, sampling: Mapping[str, Any]) -> tuple[Cause, Cause]:
    """Test whether sampling from a subset of tokens, or from a larger vocabulary, offsets log mu by a constant.

    If mu keeps a set K of the tokens, then mu = pi_old / pi_old(K) on K, and log mu - log pi_old = -log pi_old(K) >= 0,
    the same for all tokens of a context. Since E_mu[pi_old / mu] = pi_old(K), one minus this mean is the mass that was
    cut off. For any other cause that leaves every token possible, the mean is 1 if enough tokens are drawn. With noise
    of more than a nat, the ratio has a tail that few samples reach, so the sample mean is below 1. However, such noise
    also puts pi_old above mu at some tokens by about the same amount, whereas truncated sampling never does.

    Truncated sampling and a padded vocabulary differ in what was cut off. Top-p, top-k and min-p leave few tokens.
    Sometimes a group's rows have sampled every one of these tokens. Their probabilities under mu then sum to 1, those
    under pi_old do not, and nothing else can cause this. A padded vocabulary leaves all real tokens. A top-k larger
    than the number of rows in a group cannot be detected in this way, so the test then relies on the run's card.

    Args:
        sampling: sampling settings in the card, such as ``top_p``; empty if there are none.
    """

    def both(verdict: Verdict, why: str, **evidence: float) -> tuple[Cause, Cause]:
        return Cause(TRUNCATED, verdict, evidence, why), Cause(EXTRA, verdict, evidence, why)

    if sampling.get("support") == "engine" and sampling.get("support_unknown") == "mask":
        return both("absent", "the run's card says that pi_old was renormalised over the support of the engine")
    if len(sampled) < LEAST_TOKENS:
        return both("not testable", f"fewer than {LEAST_TOKENS} tokens are left for the test")
    gap, cluster = sampled.gap, sampled.cluster
    larger_mu, larger_old = np.square(np.minimum(gap, 0.0)), np.square(np.maximum(gap, 0.0))
    missing = estimate_ratio(-np.expm1(np.clip(gap, -20, 20)), np.ones_like(gap), cluster)
    one_sided = estimate_ratio(larger_mu, gap * gap, cluster)
    # Root mean squared gap where pi_old is larger; None if it is larger nowhere.
    above = estimate((larger_old, gap > 0), cluster, lambda sums: float(np.sqrt(sums[0] / sums[1])))
    of_mu, of_old, of_context = sum_probabilities(sampled)
    # Only contexts whose sampled tokens contain all of mu's mass, but not all of pi_old's, show truncation.
    short = of_old < 1.0 - SHORT
    whole = short & (of_mu > 1.0 - WHOLE)
    exhausted, contexts = estimate_ratio(whole, short, of_context), int(whole.sum())
    if missing is None or one_sided is None or exhausted is None:
        return both("absent", "both policies agree bit for bit")
    if missing.value < -1.0:
        # If a mean ratio is above 2, one minus the ratio cannot be a mass.
        ratio = 1.0 - missing.value
        why = f"the mean of pi_old/mu over mu's samples is {ratio:.2g}, but it would be below 1 if mass were cut off"
        return both("absent", why, mean_ratio=ratio, one_sided=one_sided.value)
    evidence = {
        "missing": missing.value,
        "missing_low": max(missing.low, -1.0),
        "missing_high": missing.high,
        **one_sided.name("one_sided", "low"),
        **exhausted.name("exhausted", "low"),
        "exhausted_contexts": contexts,
    }
    if missing.low <= THRESHOLDS.missing or one_sided.low <= THRESHOLDS.one_sided:
        share = f"{one_sided.value:.0%} of the squared gap is at tokens where mu is larger"
        return both("absent", f"mu has cut off {missing.value:.2%} of pi_old's mass, and {share}", **evidence)
    if above is not None:
        evidence |= above.name("above", "high")
        if above.high > THRESHOLDS.above:
            why = (
                f"where pi_old exceeds mu, the difference is {above.value:.2g} nats, which cutting off mass cannot "
                "cause"
            )
            return both("absent", why, **evidence)
    constant = (
        f"tokens at which mu is larger than pi_old make up {one_sided.value:.0%} of the squared gap, as if "
        f"{missing.value:.2%} [{missing.low:.2%}, {missing.high:.2%}] of the mass were cut off"
    )
    restricted = _format_restrictions(sampling)
    if contexts >= THRESHOLDS.exhausted:
        by_what = (
            f"in {contexts} contexts the sampled tokens are all the tokens that mu allows, but not all that pi_old "
            "allows"
        )
    elif restricted:
        by_what = f"the run's card says {restricted}"
    else:
        not_all = f"the sampled tokens have all of mu's mass in only {contexts} contexts"
        sentence = (
            f"{constant}, but the samples almost never include every token that mu allows: the engine masks some ids "
            f"that pi_old allows"
        )
        fix = "cut the output layer to the tokenizer's size (config.vocab_size), or mask the same ids in the trainer"
        return Cause(TRUNCATED, "absent", evidence, not_all), Cause(EXTRA, "present", evidence, sentence, fix)
    fix = "actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1, and no min_p"
    real = "the tokens that were cut off have a nonzero probability in the trainer"
    return (
        Cause(TRUNCATED, "present", evidence, f"{constant}; {by_what}", fix),
        Cause(EXTRA, "absent", evidence, real),
    )


def _format_restrictions(sampling: Mapping[str, Any]) -> str:
    """Format the sampling settings that exclude tokens; empty if there are none."""
    known = {key: value for key, value in sampling.items() if isinstance(value, int | float)}
    excludes = {"top_p": known.get("top_p", 1) < 1, **{key: known.get(key, 0) > 0 for key in ("top_k", "min_p")}}
    return ", ".join(f"{key}={known[key]:g}" for key, excluded in excludes.items() if excluded)


def find_numerics(sampled: SampledTokens, *, offset: bool) -> Cause:
    """Test whether two engines round differently.

    The gap then has no preferred sign and is the same at every step. The gap has a heavy tail at low probability, where
    the normaliser does not damp errors in the logits. The test uses the standard deviation of the gap at medium
    probabilities, and how much it grows towards low probability.

    Args:
        offset: whether mu lies above pi_old by a constant in each context; if so, the test uses only the variation
            within contexts.
    """
    mu, gap, cluster = sampled.mu, sampled.gap, sampled.cluster
    if offset:
        contexts, index, centred_mu, centred_old = center_within_contexts(sampled)
        if contexts < LEAST_CONTEXTS:
            why = f"only {contexts} contexts have two different sampled tokens"
            return Cause(NUMERICS, "not testable", {"contexts": contexts}, why)
        # Centring removes the offset of each context.
        mu, gap, cluster = mu[index], centred_old - centred_mu, cluster[index]
    if len(gap) < LEAST_TOKENS:
        return Cause(NUMERICS, "not testable", {}, f"fewer than {LEAST_TOKENS} tokens are left for the test")
    low, middle, high = mu < np.log(0.1), (mu >= np.log(0.1)) & (mu < np.log(0.9)), mu >= np.log(0.5)
    columns = [column for chosen in (low, middle, high) for column in (chosen, chosen * gap, chosen * gap * gap)]
    noise = estimate(columns[3:6], cluster, _compute_deviation)
    tail = estimate(columns, cluster, lambda sums: _compute_deviation(sums[:3]) / _compute_deviation(sums[6:]))
    evidence: dict[str, float] = {"tokens_low": float(low.sum())}
    if noise is None:
        return Cause(NUMERICS, "not testable", evidence, "no token has a probability between 0.1 and 0.9")
    evidence |= noise.name("noise", "low", "high")
    if tail is not None:
        evidence |= tail.name("tail", "low")
    if noise.low <= THRESHOLDS.noise:
        sentence = f"the gap's deviation of {noise.value:.2g} nats is normal for two engines in bfloat16"
        return Cause(NUMERICS, "absent", evidence, sentence)
    if tail is None or tail.low <= THRESHOLDS.tail:
        sentence = f"the gap of {noise.value:.2g} nats does not increase at low probability"
        return Cause(NUMERICS, "absent", evidence, sentence)
    sentence = (
        f"the gap has no preferred sign; its deviation is {noise.value:.2g} nats [{noise.low:.2g}, {noise.high:.2g}] "
        f"at probabilities between 0.1 and 0.9, and {tail.value:.1f} times as large below 0.1 as above 0.5, so the "
        "engines compute with different precision"
    )
    fix = (
        "give the engine the trainer's precision (actor_rollout_ref.rollout.dtype, and no quantised weights or cache); "
        f"{BATCH_INVARIANT}; or correct for the mismatch: 'correction=[tis_token,icepop]'"
    )
    return Cause(NUMERICS, "present", evidence, sentence, fix)


def _compute_deviation(sums: Array) -> float:
    """Compute the standard deviation from sums of 1, x and x^2; NaN for fewer than two values."""
    count, first, second = sums
    return float(np.sqrt(max(second / count - (first / count) ** 2, 0.0))) if count >= 2 else float("nan")
