"""The estimators to compare, the rows that masks keep by length, and the claims that must hold exactly.

Each claim is a function that checks it and returns a sentence with its figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from enumeration import Estimator, Family, Measurement, Policies, measure
from seeds import require

from recipe.offpolicy.correction import CorrectionSpec, RolloutStage, rollout_stage


def build_estimator(name: str, family: Family, **correction: Any) -> Estimator:
    """Build an estimator from values of the Hydra node ``correction``."""
    return Estimator(name, family, CorrectionSpec.from_mapping(correction))


def _weight(level: str, upper: float | None = None, **others: Any) -> dict[str, Any]:
    return {"weight": {"level": level, "kind": "truncate", "lower": None, "upper": upper} | others}


def _mask(**mask: Any) -> dict[str, Any]:
    return {"ratio": "rollout", "level": "sequence", "when": "any"} | mask


def _one_mask(**mask: Any) -> dict[str, Any]:
    return {"masks": {"mask": _mask(**mask)}}


GSPO_CLIP = {
    "high": _mask(ratio="full", aggregate="geometric", lower=None, upper=1.2, when="positive"),
    "low": _mask(ratio="full", aggregate="geometric", lower=0.8, upper=None, when="negative"),
}
"""PPO's clip of the geometric mean ratio: where the clip binds, given the sign of the advantage, there is no gradient.

GSPO's own gradient has a further factor 1 / T, which is the same for all rows here.
"""

PPO_CLIP: dict[str, dict[str, Any]] = {
    "high": {"level": "token", "aggregate": "any", "lower": None, "upper": 1.2, "when": "positive"},
    "low": {"level": "token", "aggregate": "any", "lower": 0.8, "upper": None, "when": "negative"},
}
"""The same clip per token; ``ratio`` determines which ratio is clipped."""

_VESPO = {
    when: {"level": "sequence", "kind": "gamma", "power": power, "rate": rate, "ratio": "full", "when": when}
    for when, power, rate in (("positive", 2.0, 3.0), ("negative", 3.0, 2.0))
}
NONE = build_estimator("none", "none")
TOKEN_IS = build_estimator("token IS", "token weight", **_weight("token"))
SEQUENCE_IS = build_estimator("sequence IS", "sequence weight", **_weight("sequence"))
SEQUENCE_IS_FULL = build_estimator("sequence IS on pi / mu", "sequence weight", **_weight("sequence", ratio="full"))
PREFIX_IS = build_estimator("prefix IS", "token weight", **_weight("prefix"))
MINPRO = build_estimator("MinPRO", "token weight", **_weight("prefix", aggregate="minimum"))
SELF_NORMALISED = build_estimator(
    "sequence IS, self-normalised", "sequence weight", **_weight("sequence", normalize=True)
)
ESTIMATORS: tuple[Estimator, ...] = (
    NONE,
    TOKEN_IS,
    build_estimator("token TIS, cap 2", "token weight", **_weight("token", 2.0)),
    build_estimator("token MIS [0.5, 2]", "token weight", **_weight("token", 2.0, kind="reject", lower=0.5)),
    build_estimator(
        "CISPO-like [0.8, 1.28]", "token weight", **_weight("token", 1.28, kind="clip", lower=0.8, ratio="full")
    ),
    PREFIX_IS,
    build_estimator("prefix TIS, cap 5", "token weight", **_weight("prefix", 5.0)),
    MINPRO,
    SEQUENCE_IS,
    SELF_NORMALISED,
    SEQUENCE_IS_FULL,
    build_estimator("sequence TIS, cap 5", "sequence weight", **_weight("sequence", 5.0)),
    build_estimator("geometric weight", "sequence weight", **_weight("sequence", aggregate="geometric")),
    build_estimator(
        "GSPO-like [0.8, 1.2]", "both", **_weight("sequence", aggregate="geometric", ratio="full"), masks=GSPO_CLIP
    ),
    build_estimator("VESPO", "sequence weight", weights=_VESPO),
    build_estimator("geometric mask [0.99, 1.01]", "mask", **_one_mask(aggregate="geometric", lower=0.99, upper=1.01)),
    build_estimator("geometric mask [0.9, 1.1]", "mask", **_one_mask(aggregate="geometric", lower=0.9, upper=1.1)),
    build_estimator("product mask [0.5, 2]", "mask", **_one_mask(aggregate="product", lower=0.5, upper=2.0)),
    build_estimator("outlier mask [0.5, 2]", "mask", **_one_mask(aggregate="any", lower=0.5, upper=2.0)),
    build_estimator(
        "OPSM, delta=0.1", "mask", **_one_mask(ratio="full", aggregate="geometric", delta=0.1, when="negative")
    ),
    build_estimator(
        "token TIS + geometric mask",
        "both",
        **_weight("token", 2.0),
        **_one_mask(aggregate="geometric", lower=0.9, upper=1.1),
    ),
)

LENGTHS = (10, 100, 1000, 4000)
MASKS = {"geometric": (0.99, 1.01), "product": (0.5, 2.0)}
"""The aggregate, and the bounds on the ratio."""
CHUNK = 1_000_000  # simulated tokens held at a time


@dataclass(frozen=True)
class LogRatio:
    """log pi_old - log mu of each token, independent and normally distributed, in nats."""

    name: str
    mean: float
    deviation: float


CASES = (
    LogRatio("noise 0.03", 0.0, 0.03),
    # For tokens sampled from mu, E[rho] = 1, so the mean of log rho is -s^2 / 2 instead of 0.
    LogRatio("noise 0.03, E[rho] = 1", -(0.03**2) / 2, 0.03),
    LogRatio("drift 0.001", 0.001, 0.0),
    LogRatio("drift 0.02", 0.02, 0.0),
)


def expected(aggregate: str, case: LogRatio, length: int) -> float:
    """Compute the probability that a row is kept; its mean follows N(m, s^2 / T), and its sum follows N(m T, s^2 T)."""
    times, root = (1.0, 1 / math.sqrt(length)) if aggregate == "geometric" else (float(length), math.sqrt(length))
    lower, upper = (math.log(bound) for bound in MASKS[aggregate])
    centre, spread = case.mean * times, case.deviation * root
    if spread == 0:
        return float(lower <= centre <= upper)
    normal = NormalDist(centre, spread)
    return normal.cdf(upper) - normal.cdf(lower)


def simulated(aggregate: str, case: LogRatio, length: int, *, rows: int, seed: int) -> float:
    """Compute the share of ``rows`` random rows that the shipped mask would keep."""
    lower, upper = MASKS[aggregate]
    spec = CorrectionSpec.from_mapping(_one_mask(aggregate=aggregate, lower=lower, upper=upper))
    generator = torch.Generator().manual_seed(seed)
    kept, left = 0, rows
    while left:
        count = min(left, max(1, CHUNK // length))
        log_ratio = case.mean + case.deviation * torch.randn(count, length, generator=generator, dtype=torch.float64)
        mu = torch.full_like(log_ratio, -1.0)
        kept += int(_run_stage(spec, mu, log_ratio).keep.all(-1).sum())
        left -= count
    return kept / rows


def _run_stage(spec: CorrectionSpec, mu: torch.Tensor, log_ratio: torch.Tensor | float) -> RolloutStage:
    mask = torch.ones_like(mu, dtype=torch.bool)
    return rollout_stage(spec, old_log_prob=mu + log_ratio, rollout_log_prob=mu, response_mask=mask)


UNBIASED = (SEQUENCE_IS, SELF_NORMALISED, SEQUENCE_IS_FULL)
BASELINE_SAFE = (*UNBIASED, TOKEN_IS, PREFIX_IS, MINPRO)
Table = Mapping[float, Mapping[str, Measurement]]
"""Mismatch or staleness -> name of the estimator -> its measurement."""


def gradient_agrees(policies: Policies) -> str:
    """Assert that the scores and automatic differentiation yield the same gradient."""
    by_scores = (policies.pi.sum(-1).exp() * policies.rewards) @ policies.scores.sum(1)
    error = float((by_scores - policies.gradient).norm() / policies.gradient.norm())
    require(error < 1e-12, f"sum pi R grad log pi differs from autograd's grad J by {error:.1e}, relative")
    return (
        f"The true gradient computed from scores equals that computed by automatic differentiation (relative error "
        f"{error:.1e})."
    )


def on_policy_is_unbiased(policies: Policies) -> str:
    """Assert that every estimator equals the policy gradient if mu = pi_old = pi."""
    worst = max(measure(estimator, policies).bias for estimator in ESTIMATORS)
    require(worst < 1e-12, f"with mu = pi_old = pi some estimator has a relative bias of {worst:.1e}")
    return f"mu = pi_old = pi: no correction changes the policy gradient (bias {worst:.1e})."


def sequence_is_unbiased(mismatches: Table, stalenesses: Table) -> str:
    """Assert that untruncated sequence IS is unbiased: with pi_old / mu at pi = pi_old, and with pi / mu everywhere."""
    errors = [row[e.name].bias for row in mismatches.values() for e in UNBIASED]
    worst = max(errors + [row[SEQUENCE_IS_FULL.name].bias for row in stalenesses.values()])
    require(worst < 1e-10, f"untruncated sequence IS has a relative bias of {worst:.1e}")
    return f"Untruncated sequence IS is unbiased at every mismatch and, on pi / mu, at every staleness ({worst:.1e})."


def baselines_stay_unbiased(mismatches: Table) -> str:
    """Assert E_mu[w_t grad log pi_t] = 0 for untruncated IS at every level and for MinPRO, but for no others."""
    held = max(row[e.name].score_mean for row in mismatches.values() for e in BASELINE_SAFE)
    require(held < 1e-12, f"untruncated IS has a score mean of {held:.1e}: a baseline would bias it")
    others = {
        e.name: max(row[e.name].score_mean for row in mismatches.values()) for e in ESTIMATORS if e not in BASELINE_SAFE
    }
    least = min(others, key=others.__getitem__)
    require(
        others[least] > 1e-6,
        f"{least} has a score mean of {others[least]:.1e} at most, where a larger value was expected",
    )
    return (
        f"E_mu[sum_t w_t grad log pi_t] = 0 for untruncated token, prefix and sequence IS and MinPRO ({held:.1e}): "
        f"baselines add no bias; the other estimators violate this at some mismatch (least: {least}, "
        f"{others[least]:.1e})."
    )


def slope(mismatches: Table, estimator: Estimator) -> float:
    """Compute the slope of log bias over log mismatch between the two smallest mismatches."""
    low, high = sorted(mismatches)[:2]
    rise = math.log(mismatches[high][estimator.name].bias / mismatches[low][estimator.name].bias)
    return rise / math.log(high / low)


def token_is_is_first_order(mismatches: Table) -> str:
    """Assert that the error of token IS is first-order in the mismatch, like the error without a weight."""
    token, none = slope(mismatches, TOKEN_IS), slope(mismatches, NONE)
    require(0.9 < token < 1.1, f"token IS: the bias grows as mismatch^{token:.3f}, expected an exponent of 1")
    return f"Token IS has a gradient error of first order: bias ~ mismatch^{token:.3f} (no correction: {none:.3f})."


def clip_fractions(policies: Policies) -> str:
    """Assert that PPO's clip ignores the mismatch on pi / pi_old, and that on pi / mu it acts before the first step."""

    def fraction(ratio: str) -> float:
        masks = {name: mask | {"ratio": ratio} for name, mask in PPO_CLIP.items()}
        return measure(build_estimator(ratio, "mask", masks=masks), policies).dropped

    separated, merged = fraction("ppo"), fraction("full")
    require(separated == 0.0, f"at pi = pi_old the clip of pi / pi_old acts on a share of {separated:.3g} of tokens")
    require(merged > 0.0, "with mu != pi_old the clip of pi / mu does not act on any token")
    return f"At pi = pi_old the clip fraction of pi / pi_old is exactly 0, that of pi / mu is {merged:.3f}."


def products() -> str:
    """Assert that small ratios multiply: 1.001^2000, 1.01^1000 and 0.99^1000 by the shipped sequence weight."""
    shown = []
    for ratio, length, figure in ((1.001, 2000, 7.3817), (1.01, 1000, 20959.0), (0.99, 1000, 4.3171e-5)):
        mu = torch.full((1, length), -1.0, dtype=torch.float64)
        product = float(_run_stage(SEQUENCE_IS.spec, mu, math.log(ratio)).weight[0, 0])
        require(math.isclose(product, figure, rel_tol=2e-5), f"{ratio}^{length}: {product:.6g}, expected {figure:g}")
        shown.append(f"{ratio}^{length} = {product:.5g}")
    return "Sequence weights multiply: " + ", ".join(shown) + "."


def keep_rates_agree(shares: Mapping[tuple[str, LogRatio, int], float], rows: int) -> str:
    """Assert that shipped masks keep as many simulated rows as a normal model predicts, up to 5 standard errors.

    Args:
        shares: (aggregate, case, length) -> share of the ``rows`` simulated rows that is kept.
    """
    worst = 0.0
    for (aggregate, case, length), share in shares.items():
        probability = expected(aggregate, case, length)
        error = abs(share - probability)
        allowed = 5 * math.sqrt(probability * (1 - probability) / rows) + 3 / rows
        off = f"the share kept differs by {error:.4f} from the prediction, but only {allowed:.4f} is allowed"
        require(error <= allowed, f"{aggregate} mask, {case.name}, T = {length}: {off}")
        worst = max(worst, error)
    return f"Simulated keep-rates agree with the normal distribution (largest difference {worst:.3f}, {rows} rows)."
