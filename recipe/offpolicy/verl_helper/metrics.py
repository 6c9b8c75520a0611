"""verl's ``rollout_corr/*`` metrics, each from one table of a row's sums.

A row without a valid token has no statistic and counts in none. Sums are float64, differences near 1 are taken about 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..correction.ratios import EXP_CLAMP
from .columns import Columns, Measure

Metrics = dict[str, Tensor]


def mismatch_metrics(columns: Columns) -> Metrics:
    """How far pi_old is from mu, rho = pi_old / mu.

    ``kl`` and ``k3_kl`` estimate KL(mu || pi_old) a token, perplexities are means over rows of exp(-mean log p),
    ``chi2_token`` and ``chi2_seq`` are E[rho^2] - 1 of tokens and of rows' products.
    """
    rows = columns.tokens > 0
    count, total = columns.tokens[rows], columns.tokens.sum()
    log_ratio = columns.log_ratio[rows]
    old, rollout, drift = columns.old[rows] / count, columns.rollout[rows] / count, -log_ratio / count
    return {
        "training_ppl": torch.exp(-old).mean(),
        "training_log_ppl": -old.mean(),
        "kl": -columns.log_ratio.sum() / total,
        "k3_kl": columns.k3.sum() / total,
        "rollout_ppl": torch.exp(-rollout).mean(),
        "rollout_log_ppl": -rollout.mean(),
        "log_ppl_diff": drift.mean(),
        "log_ppl_abs_diff": drift.abs().mean(),
        "log_ppl_diff_max": drift.max(),
        "log_ppl_diff_min": drift.min(),
        "ppl_ratio": torch.exp(drift).mean(),
        "chi2_token": columns.chi2.sum() / total,
        "chi2_seq": torch.expm1(2 * log_ratio.clamp(-EXP_CLAMP, EXP_CLAMP)).mean(),
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
