"""verl's ``rollout_corr/*`` metrics, each from one table of a row's sums.

A row without a valid token has no statistic and counts in none. Sums are float64, differences near 1 are taken about 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .correction.ratios import EXP_CLAMP

Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class Measure:
    """Columns of one quantity v that tokens have, or that all tokens of a row share; each (B,) float64.

    Attributes:
        level: whether shares of what lies outside the bounds count tokens or rows.
        about: a guess of the mean, about which deviations are taken.
        total, square: sums of v and v^2 over the row's tokens.
        deviation, squared_deviation: sums of c - about and its square, c being v clamped to its bounds.
        least, greatest: extremes of v; without meaning for a row without a token.
        above, below: tokens beyond the upper and the lower bound.
    """

    level: Literal["token", "sequence"]
    about: float
    total: Tensor
    square: Tensor
    deviation: Tensor
    squared_deviation: Tensor
    least: Tensor
    greatest: Tensor
    above: Tensor
    below: Tensor


def measure_tokens(
    values: Tensor, valid: Tensor, above: Tensor, below: Tensor, *, clamp: tuple[float, float], about: float
) -> Measure:
    """Columns of a quantity that each token has.

    Args:
        values: (B, T) float64.
        valid, above, below: (B, T) bool.
        clamp: bounds of c, infinite where open.
    """
    values = torch.where(valid, values, about)
    deviation = values.clamp(*clamp) - about
    deviation = torch.where(valid, deviation, 0.0)
    return Measure(
        level="token",
        about=about,
        total=torch.where(valid, values, 0.0).sum(-1),
        square=torch.where(valid, values, 0.0).square().sum(-1),
        deviation=deviation.sum(-1),
        squared_deviation=deviation.square().sum(-1),
        least=torch.where(valid, values, math.inf).amin(-1),
        greatest=torch.where(valid, values, -math.inf).amax(-1),
        above=(valid & above).sum(-1, dtype=torch.float64),
        below=(valid & below).sum(-1, dtype=torch.float64),
    )


def measure_rows(
    values: Tensor, tokens: Tensor, above: Tensor, below: Tensor, *, clamp: tuple[float, float], about: float
) -> Measure:
    """Columns of a quantity that all tokens of a row share.

    Args:
        values, tokens: (B,) float64.
        above, below: (B,) bool.
        clamp: bounds of c, infinite where open.
    """
    deviation = values.clamp(*clamp) - about
    return Measure(
        level="sequence",
        about=about,
        total=tokens * values,
        square=tokens * values.square(),
        deviation=tokens * deviation,
        squared_deviation=tokens * deviation.square(),
        least=values,
        greatest=values,
        above=tokens * above,
        below=tokens * below,
    )


def mismatch_metrics(
    tokens: Tensor, old_sum: Tensor, rollout_sum: Tensor, log_ratio_sum: Tensor, k3_sum: Tensor, chi2_sum: Tensor
) -> Metrics:
    """How far pi_old is from mu, rho = pi_old / mu.

    ``kl`` and ``k3_kl`` estimate KL(mu || pi_old) a token, perplexities are means over rows of exp(-mean log p),
    ``chi2_token`` and ``chi2_seq`` are E[rho^2] - 1 of tokens and of rows' products.

    Args:
        tokens: (B,) float64, T.
        old_sum, rollout_sum, log_ratio_sum, k3_sum: (B,) float64, sums over a row's valid tokens, in nats.
        chi2_sum: (B,) float64, sum of rho^2 - 1.
    """
    rows = tokens > 0
    count, total = tokens[rows], tokens.sum()
    old, rollout, drift = old_sum[rows] / count, rollout_sum[rows] / count, -log_ratio_sum[rows] / count
    return {
        "training_ppl": torch.exp(-old).mean(),
        "training_log_ppl": -old.mean(),
        "kl": -log_ratio_sum.sum() / total,
        "k3_kl": k3_sum.sum() / total,
        "rollout_ppl": torch.exp(-rollout).mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": drift.mean(),
        "log_ppl_abs_diff": drift.abs().mean(),
        "log_ppl_diff_max": drift.max(),
        "log_ppl_diff_min": drift.min(),
        "ppl_ratio": torch.exp(drift).mean(),
        "chi2_token": chi2_sum.sum() / total,
        "chi2_seq": torch.expm1(2 * log_ratio_sum[rows].clamp(-EXP_CLAMP, EXP_CLAMP)).mean(),
    }


def weight_metrics(tokens: Tensor, raw: Measure, applied: Measure, lower: float, upper: float) -> Metrics:
    """Importance weights before their bounds (``raw``) and as applied.

    ``rollout_is_max`` and ``min`` are of the applied weights at token level and of the raw ones at sequence level,
    ``rollout_is_eff_sample_size`` is (sum w)^2 / (n sum w^2), in [0, 1], 0 where no weight is left.

    Args:
        tokens: (B,) float64, T.
        lower, upper: bounds that raw row means are held against.
    """
    rows = tokens > 0
    total = tokens.sum()
    extremes = applied if applied.level == "token" else raw
    row_mean, raw_row_mean = ((m.total[rows] / tokens[rows]) for m in (applied, raw))
    weight_sum, square = applied.total.sum(), applied.square.sum()
    prefix = "rollout_is"
    return {
        f"{prefix}_mean": weight_sum / total,
        f"{prefix}_max": extremes.greatest[rows].max(),
        f"{prefix}_min": extremes.least[rows].min(),
        f"{prefix}_std": _std(applied, total),
        f"{prefix}_eff_sample_size": torch.where(square > 0, weight_sum.square() / (total * square), 0.0),
        f"{prefix}_ratio_fraction_high": _share(raw, raw.above, tokens),
        f"{prefix}_ratio_fraction_low": _share(raw, raw.below, tokens),
        **_row_means(prefix, row_mean, ideal=1.0),
        f"{prefix}_seq_fraction_high": _fraction(raw_row_mean > upper),
        f"{prefix}_seq_fraction_low": _fraction(raw_row_mean < lower),
    }


def rejection_metrics(option: str, tokens: Tensor, statistic: Measure, lower: float | None, upper: float) -> Metrics:
    """One rejection option: its statistic, and the shares of tokens and rows that it rejects.

    Args:
        option: verl's name of it.
        tokens: (B,) float64, T.
        statistic: k1, k2 or k3 as the option aggregates it.
        lower, upper: its bounds in nats; lower is None for k2 and k3.
    """
    rows = tokens > 0
    total = tokens.sum()
    row_mean = statistic.total[rows] / tokens[rows]
    beyond = statistic.above + statistic.below
    prefix = f"rollout_rs_{option}"
    metrics = {
        f"{prefix}_mean": statistic.total.sum() / total,
        f"{prefix}_max": statistic.greatest[rows].max(),
        f"{prefix}_min": statistic.least[rows].min(),
        f"{prefix}_fraction_high": _share(statistic, statistic.above, tokens),
        f"{prefix}_fraction_low": _share(statistic, statistic.below, tokens),
        f"{prefix}_std": _std(statistic, total),
        **_row_means(prefix, row_mean, ideal=0.0),
        f"{prefix}_seq_fraction_high": _fraction(_float32(row_mean) > upper),
        f"{prefix}_masked_fraction": beyond.sum() / total,
        f"{prefix}_seq_masked_fraction": _fraction(beyond[rows] > 0),
    }
    if lower is not None:
        metrics[f"{prefix}_seq_fraction_low"] = _fraction(_float32(row_mean) < lower)
    return metrics


def total_rejection_metrics(tokens: Tensor, rejected: Tensor) -> Metrics:
    """Shares of tokens, and of rows with any, that the options reject together; both arguments (B,) float64 counts."""
    return {
        "rollout_rs_masked_fraction": rejected.sum() / tokens.sum(),
        "rollout_rs_seq_masked_fraction": _fraction(rejected[tokens > 0] > 0),
    }


def to_host(metrics: Metrics) -> dict[str, float]:
    """The numbers, moved by one transfer."""
    return dict(zip(metrics, torch.stack([value.double() for value in metrics.values()]).tolist(), strict=True))


def _row_means(prefix: str, row_mean: Tensor, *, ideal: float) -> Metrics:
    """Over rows; the standard deviation is the unbiased one, 0 for a single row."""
    std = row_mean.std() if len(row_mean) > 1 else torch.zeros_like(row_mean[0])
    return {
        f"{prefix}_seq_mean": row_mean.mean(),
        f"{prefix}_seq_std": std,
        f"{prefix}_seq_max": row_mean.max(),
        f"{prefix}_seq_min": row_mean.min(),
        f"{prefix}_seq_max_deviation": (row_mean - ideal).abs().max(),
    }


def _std(measure: Measure, total: Tensor) -> Tensor:
    mean = measure.deviation.sum() / total
    return (measure.squared_deviation.sum() / total - mean.square()).clamp(min=0).sqrt()


def _share(measure: Measure, part: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens at token level, of rows at sequence level."""
    return part.sum() / tokens.sum() if measure.level == "token" else _fraction(part[tokens > 0] > 0)


def _fraction(condition: Tensor) -> Tensor:
    return condition.double().mean()


def _float32(value: Tensor) -> Tensor:
    """Bounds are compared in float32, as the masks compare them."""
    return value.to(torch.float32)
