"""Asserted exact properties of the estimators; each function returns its claim as a sentence, with its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from enumeration import Policies
from estimator_catalogue import (
    ESTIMATORS,
    MINPRO,
    NONE,
    PPO_CLIP,
    PREFIX_IS,
    SELF_NORMALISED,
    SEQUENCE_IS,
    SEQUENCE_IS_FULL,
    TOKEN_IS,
    Estimator,
)
from expectation import Measurement, measure
from keep_rates import MASKS, LogRatio, expected
from seeds import require

from recipe.offpolicy.correction import CorrectionSpec, rollout_stage

UNBIASED = (SEQUENCE_IS, SELF_NORMALISED, SEQUENCE_IS_FULL)
BASELINE_SAFE = (*UNBIASED, TOKEN_IS, PREFIX_IS, MINPRO)
Table = Mapping[float, Mapping[str, Measurement]]
"""Mismatch or staleness -> estimator's name -> its measurement."""


def gradient_agrees(policies: Policies) -> str:
    """Assert that scores and automatic differentiation give one gradient."""
    by_scores = (policies.pi.sum(-1).exp() * policies.rewards) @ policies.scores.sum(1)
    error = float((by_scores - policies.gradient).norm() / policies.gradient.norm())
    require(error < 1e-12, f"sum pi R grad log pi differs from autograd's grad J by {error:.1e}, relative")
    return f"The true gradient by scores equals the one by automatic differentiation (relative error {error:.1e})."


def on_policy_is_unbiased(policies: Policies) -> str:
    """Assert that with mu = pi_old = pi every estimator is the policy gradient."""
    worst = max(measure(estimator, policies).bias for estimator in ESTIMATORS)
    require(worst < 1e-12, f"with mu = pi_old = pi some estimator has a relative bias of {worst:.1e}")
    return f"mu = pi_old = pi: every correction leaves the policy gradient alone (bias {worst:.1e})."


def sequence_is_unbiased(mismatches: Table, stalenesses: Table) -> str:
    """Assert that untruncated sequence IS is unbiased on pi_old / mu at pi = pi_old, and on pi / mu everywhere."""
    errors = [row[e.name].bias for row in mismatches.values() for e in UNBIASED]
    errors += [row[SEQUENCE_IS_FULL.name].bias for row in stalenesses.values()]
    require(max(errors) < 1e-10, f"untruncated sequence IS has a relative bias of {max(errors):.1e}")
    return f"Untruncated sequence IS is unbiased at every mismatch, on pi / mu at every staleness ({max(errors):.1e})."


def baselines_stay_unbiased(mismatches: Table) -> str:
    """Assert E_mu[w_t grad log pi_t] = 0 for untruncated IS at every level and for MinPRO, and for nothing else."""
    held = max(row[e.name].score_mean for row in mismatches.values() for e in BASELINE_SAFE)
    require(held < 1e-12, f"untruncated IS has a score mean of {held:.1e}: a baseline would bias it")
    others = {
        e.name: max(row[e.name].score_mean for row in mismatches.values()) for e in ESTIMATORS if e not in BASELINE_SAFE
    }
    least = min(others, key=others.__getitem__)
    require(others[least] > 1e-6, f"{least} has a score mean of {others[least]:.1e} at most, where 0 was not expected")
    return (
        f"E_mu[sum_t w_t grad log pi_t] = 0 for untruncated token, prefix and sequence IS and MinPRO ({held:.1e}): "
        f"baselines add no bias; the others break this at some mismatch (least: {least}, {others[least]:.1e})."
    )


def slope(mismatches: Table, estimator: Estimator) -> float:
    """Compute the slope of log bias over log mismatch between the two smallest mismatches."""
    low, high = sorted(mismatches)[:2]
    rise = math.log(mismatches[high][estimator.name].bias / mismatches[low][estimator.name].bias)
    return rise / math.log(high / low)


def token_is_is_first_order(mismatches: Table) -> str:
    """Assert that token IS has an error of the order of the mismatch itself, as has no weight at all."""
    token, none = slope(mismatches, TOKEN_IS), slope(mismatches, NONE)
    require(0.9 < token < 1.1, f"token IS: the bias grows as mismatch^{token:.3f}, expected an exponent of 1")
    return f"Token IS has a gradient error of first order: bias ~ mismatch^{token:.3f} (no correction: {none:.3f})."


def clip_fractions(policies: Policies) -> str:
    """Assert that PPO's clip on pi / pi_old ignores the mismatch, and on pi / mu clips before the first step."""

    def fraction(ratio: str) -> float:
        masks = {name: mask | {"ratio": ratio} for name, mask in PPO_CLIP.items()}
        return measure(Estimator(ratio, "mask", {"masks": masks}), policies).dropped

    separated, merged = fraction("ppo"), fraction("full")
    require(separated == 0.0, f"at pi = pi_old the clip of pi / pi_old acts on a share of {separated:.3g} of tokens")
    require(merged > 0.0, "with mu != pi_old the clip of pi / mu acts on no token")
    return f"At pi = pi_old the clip fraction of pi / pi_old is exactly 0, that of pi / mu is {merged:.3f}."


def products() -> str:
    """Assert that small ratios multiply: 1.001^2000, 1.01^1000 and 0.99^1000 by the shipped sequence weight."""
    weight = {"weight": {"level": "sequence", "kind": "truncate", "lower": None, "upper": None}}
    spec = CorrectionSpec.from_mapping(weight)
    shown = []
    for ratio, length, figure in ((1.001, 2000, 7.3817), (1.01, 1000, 20959.0), (0.99, 1000, 4.3171e-5)):
        mu = torch.full((1, length), -1.0, dtype=torch.float64)
        stage = rollout_stage(
            spec,
            old_log_prob=mu + math.log(ratio),
            rollout_log_prob=mu,
            response_mask=torch.ones_like(mu, dtype=torch.bool),
        )
        product = float(stage.weight[0, 0])
        require(math.isclose(product, figure, rel_tol=2e-5), f"{ratio}^{length}: {product:.6g}, expected {figure:g}")
        shown.append(f"{ratio}^{length} = {product:.5g}")
    return "Sequence weights multiply: " + ", ".join(shown) + "."


def keep_rates_agree(
    cases: Sequence[LogRatio], lengths: Sequence[int], rows: int, share: Callable[[str, LogRatio, int], float]
) -> str:
    """Assert that the shipped masks keep as many simulated rows as a normal distribution, within 5 standard errors.

    Args:
        share: (aggregate, case, length) -> share of ``rows`` simulated rows kept.
    """
    worst = 0.0
    for aggregate in MASKS:
        for case in cases:
            for length in lengths:
                probability = expected(aggregate, case, length)
                error = abs(share(aggregate, case, length) - probability)
                allowed = 5 * math.sqrt(probability * (1 - probability) / rows) + 3 / rows
                require(
                    error <= allowed,
                    f"{aggregate} mask, {case.name}, T = {length}: the share kept is off by {error:.4f}, "
                    f"{allowed:.4f} is allowed",
                )
                worst = max(worst, error)
    return f"Simulated keep-rates agree with the normal distribution (largest difference {worst:.3f}, {rows} rows)."
