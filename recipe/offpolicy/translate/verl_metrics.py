"""verl's ``rollout_corr/*`` metrics, computed from the per-row sums.

All sums are over rows with tokens; the caller excludes rows without tokens, which have no statistic and do not count.
Sums are float64, and values near 1 are summed as differences from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..correction.ratios import EXP_CLAMP
from .row_sums import Numbers, QuantitySums, RowSums, Truths, compare_with_bounds

Metrics = dict[str, float]


def compute_mismatch_metrics(columns: RowSums) -> Metrics:
    """Compute the distance of pi_old from mu, with rho = pi_old / mu.

    ``kl`` and ``k3_kl`` estimate KL(mu || pi_old) per token; perplexities are means over rows of exp(-mean log p);
    ``chi2_token`` and ``chi2_seq`` are E[rho^2] - 1 over tokens and over rows' products.
    """
    count, total = columns.tokens, columns.tokens.sum()
    means = np.stack([columns.old, columns.rollout, columns.log_ratio]) / -count
    drift = means[2]
    products = np.expm1(2 * np.clip(columns.log_ratio, -EXP_CLAMP, EXP_CLAMP))
    with np.errstate(over="ignore"):  # a perplexity may be infinite
        training_ppl, rollout_ppl, ppl_ratio = np.exp(means).mean(-1).tolist()
    training, rollout, difference = means.mean(-1).tolist()
    return {
        "training_ppl": training_ppl,
        "training_log_ppl": training,
        "kl": float(-columns.log_ratio.sum() / total),
        "k3_kl": float(columns.k3.sum() / total),
        "rollout_ppl": rollout_ppl,
        "rollout_log_ppl": rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": float(np.abs(drift).mean()),
        "log_ppl_diff_max": float(drift.max()),
        "log_ppl_diff_min": float(drift.min()),
        "ppl_ratio": ppl_ratio,
        "chi2_token": float(columns.chi2.sum() / total),
        "chi2_seq": float(products.mean()),
    }


def compute_weight_metrics(tokens: Numbers, measures: QuantitySums, lower: float, upper: float) -> Metrics:
    """Compute metrics of the importance weights, before and after their bounds.

    ``rollout_is_max`` and ``min`` describe the applied weights at token level and the raw weights at sequence level;
    ``rollout_is_eff_sample_size`` is (sum w)^2 / (n sum w^2), in [0, 1], or 0 if no weight is left.

    Args:
        tokens: (B,) T.
        lower, upper: bounds that raw row means are compared with.
    """
    raw_row_mean, row_mean = measures["total"] / tokens
    total = tokens.sum()
    # verl takes extremes of the applied weights per token, and of the raw weights per sequence.
    extremes = 1 if measures.of_tokens[1] else 0
    weight_sum, square = float(measures["total"][1].sum()), float(measures["square"][1].sum())
    raw, applied = measures.select_quantities(slice(0, 1)), measures.select_quantities(slice(1, 2))
    prefix = "rollout_is"
    return {
        f"{prefix}_mean": float(weight_sum / total),
        f"{prefix}_max": float(measures["greatest"][extremes].max()),
        f"{prefix}_min": float(measures["least"][extremes].min()),
        f"{prefix}_std": float(_std(applied, tokens)[0]),
        f"{prefix}_eff_sample_size": float(weight_sum**2 / (total * square)) if square > 0 else 0.0,
        f"{prefix}_ratio_fraction_high": float(_shares(raw, raw["above"], tokens)[0]),
        f"{prefix}_ratio_fraction_low": float(_shares(raw, raw["below"], tokens)[0]),
        **_of_row_means([prefix], row_mean[None], ideal=1.0),
        f"{prefix}_seq_fraction_high": float((raw_row_mean > upper).mean()),
        f"{prefix}_seq_fraction_low": float((raw_row_mean < lower).mean()),
    }


def compute_rejection_metrics(
    limits: Mapping[str, tuple[float | None, float]], tokens: Numbers, statistics: QuantitySums
) -> Metrics:
    """Compute, for each rejection option, its statistic and the shares of tokens and rows that it rejects.

    Args:
        limits: verl's name of each option -> its bounds in nats; the lower bound is None for k2 and k3.
        tokens: (B,) T.
        statistics: k1, k2 or k3 as each option aggregates it, in the same order.
    """
    total = tokens.sum()
    row_mean = statistics["total"] / tokens
    outside = statistics["above"] + statistics["below"]
    lower = np.array([-np.inf if low is None else low for low, _ in limits.values()])
    row_above, row_below = compare_with_bounds(row_mean, lower, np.array([upper for _, upper in limits.values()]))
    of_all = {
        "mean": statistics["total"].sum(-1) / total,
        "max": statistics["greatest"].max(-1),
        "min": statistics["least"].min(-1),
        "fraction_high": _shares(statistics, statistics["above"], tokens),
        "fraction_low": _shares(statistics, statistics["below"], tokens),
        "std": _std(statistics, tokens),
        "seq_fraction_high": row_above.mean(-1),
        "seq_fraction_low": row_below.mean(-1),
        "masked_fraction": outside.sum(-1) / total,
        "seq_masked_fraction": (outside > 0).mean(-1),
    }
    prefixes = [f"rollout_rs_{option}" for option in limits]
    metrics = _named(prefixes, of_all) | _of_row_means(prefixes, row_mean, ideal=0.0)
    for prefix, (low, _) in zip(prefixes, limits.values(), strict=True):
        if low is None:
            del metrics[f"{prefix}_seq_fraction_low"]
    return metrics


def compute_total_rejection_metrics(tokens: Numbers, rejected: Numbers) -> Metrics:
    """Compute the shares of tokens, and of rows with a token, that the options together reject, from (B,) counts."""
    return {
        "rollout_rs_masked_fraction": float(rejected.sum() / tokens.sum()),
        "rollout_rs_seq_masked_fraction": float((rejected > 0).mean()),
    }


def _of_row_means(prefixes: Sequence[str], row_means: Numbers, *, ideal: float) -> Metrics:
    """Summarise (m, B) row means over rows; the standard deviation is unbiased, 0 for a single row."""
    single = row_means.shape[-1] == 1
    return _named(
        prefixes,
        {
            "seq_mean": row_means.mean(-1),
            "seq_std": np.zeros(len(row_means)) if single else row_means.std(-1, ddof=1),
            "seq_max": row_means.max(-1),
            "seq_min": row_means.min(-1),
            "seq_max_deviation": np.abs(row_means - ideal).max(-1),
        },
    )


def _named(prefixes: Sequence[str], columns: Mapping[str, Numbers]) -> Metrics:
    """Name one metric for each prefix and column, from (m,) values."""
    return {
        f"{prefix}_{name}": value
        for name, values in columns.items()
        for prefix, value in zip(prefixes, values.tolist(), strict=True)
    }


def _std(measures: QuantitySums, tokens: Numbers) -> Numbers:
    """Compute the standard deviation over tokens, (m,)."""
    total = tokens.sum()
    variance = measures["squared_deviation"].sum(-1) / total - np.square(measures["deviation"].sum(-1) / total)
    deviation: Numbers = np.sqrt(np.maximum(variance, 0.0))
    return deviation


def _shares(measures: QuantitySums, part: Numbers, tokens: Numbers) -> Numbers:
    """Compute shares of tokens at token level and of rows at sequence level, (m,)."""
    rejected: Truths = part > 0
    return np.where(measures.of_tokens, part.sum(-1) / tokens.sum(), rejected.mean(-1))
