"""Stale weights or cache: the gap grows from step to step and falls back at a synchronisation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..profiles import k3
from .cause import Cause, absent, untestable
from .sampled import Array, Estimate, Sampled, estimate
from .thresholds import LEAST_TOKENS, THRESHOLDS

NAME = "stale weights"
_FIX = (
    "synchronise at every step and clear the engine's cache; where staleness is meant, bound it with "
    "trainer.v1.sampler.max_off_policy_threshold and correct for it: correction=[tis_token,opsm]"
)


def find(sampled: Sampled) -> tuple[Cause, np.ndarray]:
    """KL of each step, or of each staleness where it is known, against the freshest.

    Returns:
        The verdict, and which tokens are fresh: all of them unless it is present.
    """
    everything = np.ones(len(sampled), dtype=bool)
    if (sampled.staleness > 0).any() and (sampled.staleness == 0).sum() >= LEAST_TOKENS:
        return _by_version(sampled)
    loss = k3(sampled.tokens.gap)
    steps = [int(step) for step in np.unique(sampled.step) if (sampled.step == step).sum() >= LEAST_TOKENS]
    if len(steps) < 2:
        return untestable(NAME, f"fewer than two steps have {LEAST_TOKENS} tokens"), everything
    series = {step: float(loss[sampled.step == step].mean()) for step in steps}
    freshest = min(steps, key=lambda step: series[step])
    worst = max(steps, key=lambda step: series[step])
    factor = _factor(sampled, sampled.step == worst, sampled.step == freshest)
    grows, falls = _shape([series[step] for step in steps])
    evidence = {f"kl_step_{step}": value for step, value in series.items()}
    evidence |= {"rises": float(grows), "resets": float(falls)}
    if factor is None:
        return untestable(NAME, "both policies agree to the bit at some step", **evidence), everything
    evidence |= {"growth": factor.value, "growth_low": factor.low, "growth_high": factor.high}
    if factor.low <= THRESHOLDS.growth or (worst < freshest and not falls):
        return (
            absent(
                NAME, f"the KL of steps differs by a factor of {factor.value:.1f} at most, without resets", **evidence
            ),
            everything,
        )
    fresh = np.isin(sampled.step, [step for step in steps if series[step] < 2 * series[freshest]])
    return (
        Cause(
            NAME,
            "present",
            evidence,
            f"the KL a token grows from {series[freshest]:.2g} nats at step {freshest} to {series[worst]:.2g} at step "
            f"{worst}, {factor.value:.0f} times, and falls back {falls} times: what the engine samples with is not "
            f"what the trainer has",
            _FIX,
        ),
        fresh,
    )


def _by_version(sampled: Sampled) -> tuple[Cause, np.ndarray]:
    fresh = sampled.staleness == 0
    stale = sampled.staleness > 0
    everything = np.ones(len(sampled), dtype=bool)
    factor = _factor(sampled, stale, fresh)
    loss = k3(sampled.tokens.gap)
    oldest = int(sampled.staleness.max())
    evidence = {
        f"kl_staleness_{age}": float(loss[sampled.staleness == age].mean())
        for age in range(oldest + 1)
        if (sampled.staleness == age).any()
    }
    if factor is None:
        return untestable(NAME, "both policies agree to the bit on fresh rows", **evidence), everything
    evidence |= {"growth": factor.value, "growth_low": factor.low, "growth_high": factor.high}
    if factor.low <= THRESHOLDS.growth:
        return (
            absent(NAME, f"stale rows have {factor.value:.1f} times the KL of fresh ones", **evidence),
            everything,
        )
    return (
        Cause(
            NAME,
            "present",
            evidence,
            f"rows that older weights sampled, by up to {oldest} steps, have {factor.value:.0f} times the KL of fresh "
            f"ones: {loss[stale].mean():.2g} against {loss[fresh].mean():.2g} nats a token",
            _FIX,
        ),
        fresh,
    )


def _factor(sampled: Sampled, here: np.ndarray, there: np.ndarray) -> Estimate | None:
    loss = k3(sampled.tokens.gap)
    columns = np.stack([here, here * loss, there, there * loss], axis=-1).astype(np.float64)
    chosen = here | there

    def ratio(sums: Array) -> float:
        return float((sums[1] / sums[0]) / (sums[3] / sums[2]))

    return estimate(columns[chosen], sampled.cluster[chosen], ratio)


def _shape(series: list[float]) -> tuple[int, int]:
    """How often the series rises by half or more, and how often it falls to less than half."""
    pairs = list(pairwise(series))
    return sum(b > 1.5 * a for a, b in pairs), sum(b < 0.5 * a for a, b in pairs)
