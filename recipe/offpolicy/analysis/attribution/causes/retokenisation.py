"""Re-tokenisation test: whether the gap occurs only in turns of a conversation whose tokens differ in the trainer."""

from __future__ import annotations

import numpy as np

from ....monitor.mismatch.shares import BINS
from ..frames import compute_k3
from .cause import LEAST_TOKENS, THRESHOLDS, Cause, report_absent, report_untestable
from .sampled_tokens import Array, Estimate, SampledTokens, estimate, sum_by_cluster

NAME = "re-tokenisation"


def find(sampled: SampledTokens) -> tuple[Cause, np.ndarray]:
    """Compare the KL of each turn with the KL of the cleanest turn, at equal probability under mu.

    Returns:
        The verdict, and a mask of the tokens in clean turns (all tokens unless the cause is present).
    """
    everything = np.ones(len(sampled), dtype=bool)
    if sampled.turns < 2:
        return report_untestable(NAME, "every row has only one turn"), everything
    turn = sampled.tokens.turn
    numbers = [int(number) for number in np.unique(turn) if (turn == number).sum() >= LEAST_TOKENS]
    if len(numbers) < 2:
        return report_untestable(NAME, f"fewer than two turns have {LEAST_TOKENS} tokens"), everything
    means = {number: float(compute_k3(sampled.tokens.gap[turn == number]).mean()) for number in numbers}
    # The cleanest turn represents the effect of the backend alone.
    cleanest = min(means, key=lambda number: means[number])
    evidence: dict[str, float] = {f"kl_turn_{number}": value for number, value in means.items()}
    evidence["cleanest"] = cleanest
    worse, clean = {}, turn == cleanest
    for number in numbers:
        if number == cleanest:
            continue
        factor = _factor(sampled, number, cleanest)
        if factor is None:
            continue
        evidence |= {f"factor_turn_{number}": factor.value, f"factor_turn_{number}_low": factor.low}
        if factor.low > THRESHOLDS.turn_factor:
            worse[number] = factor
        else:
            clean |= turn == number
    if not worse:
        return report_absent(NAME, "all turns have about the same gap at equal probability", **evidence), everything
    worst = max(worse, key=lambda number: worse[number].value)
    return (
        Cause(
            NAME,
            "present",
            evidence,
            f"in turn {' and '.join(str(number + 1) for number in sorted(worse))} the KL per token is up to "
            f"{worse[worst].value:,.0f} times that of turn {cleanest + 1} at equal probability "
            f"({means[worst]:.2g} against {means[cleanest]:.2g} nats)",
            "train on the token ids that the engine received and returned: an agent loop must keep them, and must "
            "never encode a conversation's text again",
        ),
        clean,
    )


def _factor(sampled: SampledTokens, number: int, cleanest: int) -> Estimate | None:
    """Estimate a turn's KL divided by the cleanest turn's KL at the same probabilities."""
    loss = compute_k3(sampled.tokens.gap)
    bins, width = sampled.tokens.probability, len(BINS)
    here, there = sampled.tokens.turn == number, sampled.tokens.turn == cleanest
    columns = np.zeros((4 * width, len(sampled)))
    index = np.arange(len(sampled))
    for offset, chosen in ((0, here), (2, there)):
        columns[offset * width + bins[chosen], index[chosen]] = 1.0
        columns[(offset + 1) * width + bins[chosen], index[chosen]] = loss[chosen]

    def ratio(sums: Array) -> float:
        count, total, clean_count, clean_total = sums.reshape(4, width)
        known = clean_count > 0
        # KL of the clean turn, reweighted to this turn's probabilities.
        expected = (count[known] * clean_total[known] / clean_count[known]).sum()
        return float(total[known].sum() / expected) if expected > 0 else float("nan")

    chosen = here | there
    return estimate(sum_by_cluster(columns[:, chosen], sampled.cluster[chosen]), ratio)
