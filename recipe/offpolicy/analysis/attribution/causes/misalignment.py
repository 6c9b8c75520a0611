"""Misalignment test: whether mu belongs to the previous or next token, or to different rows altogether."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..frames import compute_k3
from .cause import LEAST_TOKENS, THRESHOLDS, Cause, report_absent, report_untestable
from .sampled_tokens import Array, Integers, SampledTokens, estimate, sum_by_cluster

NAME = "misalignment"
LOWEST = -15.0
"""Log-probs are clamped at this value, so that no single token determines the result."""


def find(sampled: SampledTokens) -> Cause:
    """Test how log pi_old correlates with log mu of the same token, and of the adjacent tokens in the row."""
    alongside = _beside(sampled)
    if alongside.verdict == "present":
        return alongside
    return _unrelated(sampled, alongside.evidence) or alongside


def _beside(sampled: SampledTokens) -> Cause:
    """Test whether the correlation is higher with a shift of one token than without a shift."""
    pairs = {lag: _pairs(sampled, lag) for lag in (-1, 0, 1)}
    if min(len(first) for first, _ in pairs.values()) < LEAST_TOKENS:
        return report_untestable(NAME, f"fewer than {LEAST_TOKENS} tokens have a neighbour")
    columns = {lag: _columns(sampled, *pair) for lag, pair in pairs.items()}
    values = {lag: _correlation(of_lag.sum(-1)) for lag, of_lag in columns.items()}
    best = max((-1, 1), key=lambda lag: values[lag])
    # Both correlations are computed from one table, so that each bootstrap draw resamples them together.
    alongside = np.zeros_like(columns[0])
    alongside[:, pairs[best][0]] = columns[best]
    sums = sum_by_cluster((*columns[0], *alongside), sampled.cluster)
    better = estimate(sums, lambda total: _correlation(total[6:]) - _correlation(total[:6]))
    evidence = {f"correlation_{lag}": value for lag, value in values.items()}
    if better is None:
        return report_untestable(NAME, "all log-probs are alike", **evidence)
    evidence |= {"better_beside": better.value, "better_low": better.low, "better_high": better.high}
    sides = {-1: "before", 1: "after"}
    if better.low <= THRESHOLDS.shift:
        return report_absent(
            NAME,
            f"the correlation of log pi_old with log mu of the same token is {values[0]:.2f}, and with log mu of an "
            f"adjacent token at most {values[best]:.2f}",
            **evidence,
        )
    return Cause(
        NAME,
        "present",
        evidence,
        f"log mu belongs to the token {sides[-best]}: with that shift its correlation with log pi_old is "
        f"{values[best]:.2f}, without the shift {values[0]:.2f}",
        "fix the slicing in the code that computes mu: mu of token t is the log-prob at position t - 1 of the logits",
    )


def _unrelated(sampled: SampledTokens, evidence: Mapping[str, float]) -> Cause | None:
    """Test whether log mu and log pi_old are uncorrelated everywhere; None if they correlate or the test cannot tell.

    A correlation in even one step or turn points to staleness or re-tokenisation in the other steps or turns.
    """
    count = len(sampled)
    if count < LEAST_TOKENS:
        return None
    columns = _columns(sampled, *_pairs(sampled, 0))
    gap = sampled.tokens.gap
    # An offset that all tokens share does not show to which token a log-prob belongs.
    loss = (np.ones(count), compute_k3(gap - gap.mean()))
    here = estimate(sum_by_cluster(columns, sampled.cluster), _correlation)
    mismatch = estimate(sum_by_cluster(loss, sampled.cluster), lambda sums: float(sums[1] / sums[0]))
    if here is None or here.high >= THRESHOLDS.related or mismatch is None or mismatch.low <= THRESHOLDS.healthy:
        return None
    for part in (sampled.step, sampled.tokens.turn):
        for number in np.unique(part):
            chosen = part == number
            if chosen.sum() >= LEAST_TOKENS and _correlation(columns[:, chosen].sum(-1)) >= THRESHOLDS.part_related:
                return None
    return Cause(
        NAME,
        "present",
        {**evidence, "correlation_0": here.value, "correlation_0_low": here.low, "correlation_0_high": here.high},
        f"log mu is unrelated to log pi_old: their correlation is {here.value:.2f} [{here.low:.2f}, "
        f"{here.high:.2f}], and the KL is {compute_k3(gap).mean():.2g} nats per token",
        "find where mu is joined to the wrong rows: the rows may be in a different order, or mu may come from "
        "entirely different weights",
    )


def _pairs(sampled: SampledTokens, lag: int) -> tuple[Integers, Integers]:
    """Return indices of tokens, and of the tokens ``lag`` positions later in the same row."""
    row, place = sampled.tokens.row, sampled.tokens.place
    first = np.arange(len(row))
    if lag == 0:
        return first, first
    # With the margin of 3, neighbours before the first and after the last position do not coincide with other rows.
    key = row * (place.max(initial=0) + 3) + place
    there = np.searchsorted(key, key + lag)
    there = np.minimum(there, len(key) - 1)
    found = key[there] == key + lag
    return first[found], there[found]


def _columns(sampled: SampledTokens, first: Integers, second: Integers) -> Array:
    """Stack the terms of a correlation, (6, n): 1, x, y, x^2, y^2, x y."""
    x = np.maximum(sampled.tokens.old[first], LOWEST)
    y = np.maximum(sampled.tokens.mu[second], LOWEST)
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y])


def _correlation(sums: Array) -> float:
    """Compute Pearson's correlation from sums of ``_columns``; NaN for a constant."""
    _, x, y, xx, yy, xy = sums / max(sums[0], 1.0)
    spread = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
    return float((xy - x * y) / np.sqrt(spread)) if spread > 0 else float("nan")
