"""Replacement for verl's rollout-correction helper and its metrics, for forks of verl that use it instead.

All sums are over rows with tokens; the caller excludes rows without tokens, because these have no statistic. Sums are
float64, and values near 1 are summed as differences from 1.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from ..correction import SpecError
from ..correction.dialects.verl import read_verl_rejections, read_verl_weight_bounds
from ..correction.ratios import EXP_CLAMP
from ..correction.row_layout import RowLayout, detect_layout
from .batch_sums import (
    CompiledBatch,
    Kind,
    Numbers,
    Quantity,
    QuantitySums,
    RowSums,
    TorchBatch,
    Truths,
    compare_with_bounds,
    measure_rows,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto


Metrics = dict[str, float]
Limits = Mapping[str, tuple[float, float]]
"""verl's name of each rejection option -> its bounds in nats; the lower bound is -inf for k2 and k3."""
_LEAST_MEAN = 1e-8  # verl does not normalise below this mean


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
    ``rollout_is_eff_sample_size`` is (sum w)^2 / (n sum w^2), in [0, 1], or 0 if all weights are 0.

    Args:
        tokens: (B,) T.
        lower, upper: bounds with which the row means of raw weights are compared.
    """
    raw_row_mean, row_mean = measures["total"] / tokens
    total = tokens.sum()
    # verl computes extremes of the applied weights at token level, and of the raw weights at sequence level.
    extremes = 1 if measures.of_tokens[1] else 0
    weight_sum, square = float(measures["total"][1].sum()), float(measures["square"][1].sum())
    return {
        "rollout_is_mean": float(weight_sum / total),
        "rollout_is_max": float(measures["greatest"][extremes].max()),
        "rollout_is_min": float(measures["least"][extremes].min()),
        "rollout_is_std": float(_std(measures, tokens)[1]),
        "rollout_is_eff_sample_size": float(weight_sum**2 / (total * square)) if square > 0 else 0.0,
        "rollout_is_ratio_fraction_high": float(_shares(measures, "above", tokens)[0]),
        "rollout_is_ratio_fraction_low": float(_shares(measures, "below", tokens)[0]),
        **_of_row_means(["rollout_is"], row_mean[None], ideal=1.0),
        "rollout_is_seq_fraction_high": float((raw_row_mean > upper).mean()),
        "rollout_is_seq_fraction_low": float((raw_row_mean < lower).mean()),
    }


def compute_rejection_metrics(limits: Limits, tokens: Numbers, statistics: QuantitySums) -> Metrics:
    """Compute, for each rejection option, its statistic and the shares of tokens and rows that it rejects.

    Args:
        tokens: (B,) T.
        statistics: k1, k2 or k3 as each option aggregates it, in the same order.
    """
    total = tokens.sum()
    row_mean = statistics["total"] / tokens
    outside = statistics["above"] + statistics["below"]
    row_above, row_below = compare_with_bounds(row_mean, *_split(limits))
    of_all = {
        "mean": statistics["total"].sum(-1) / total,
        "max": statistics["greatest"].max(-1),
        "min": statistics["least"].min(-1),
        "fraction_high": _shares(statistics, "above", tokens),
        "fraction_low": _shares(statistics, "below", tokens),
        "std": _std(statistics, tokens),
        "seq_fraction_high": row_above.mean(-1),
        "seq_fraction_low": row_below.mean(-1),
        "masked_fraction": outside.sum(-1) / total,
        "seq_masked_fraction": (outside > 0).mean(-1),
    }
    prefixes = [f"rollout_rs_{option}" for option in limits]
    metrics = _named(prefixes, of_all) | _of_row_means(prefixes, row_mean, ideal=0.0)
    for prefix, (low, _) in zip(prefixes, limits.values(), strict=True):
        if math.isinf(low):
            del metrics[f"{prefix}_seq_fraction_low"]
    return metrics


def _of_row_means(prefixes: Sequence[str], row_means: Numbers, *, ideal: float) -> Metrics:
    """Summarise (m, B) row means over the rows; the standard deviation is unbiased, and 0 for a single row."""
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
    """Build one metric for each prefix and column, from (m,) values."""
    return {
        f"{prefix}_{name}": value
        for name, values in columns.items()
        for prefix, value in zip(prefixes, values.tolist(), strict=True)
    }


def _std(measures: QuantitySums, tokens: Numbers) -> Numbers:
    """Compute the standard deviation over tokens, (m,)."""
    total = tokens.sum()
    variance = measures["squared_deviation"].sum(-1) / total - np.square(measures["deviation"].sum(-1) / total)
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def _shares(measures: QuantitySums, side: str, tokens: Numbers) -> Numbers:
    """Compute the share of tokens at token level, and of rows at sequence level, beyond a bound: (m,)."""
    part = measures[side]
    return np.where(measures.of_tokens, part.sum(-1) / tokens.sum(), (part > 0).mean(-1))


def verl_rollout_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """Compute weights, mask and metrics like verl's ``compute_rollout_correction_and_rejection_mask``.

    Sums are float64, and padding is never read. A token whose log-prob is not finite is excluded from weights, mask and
    metrics. A row without tokens is excluded from the metrics. On the CPU, if numba is installed, each row is read
    once, and apart from the results, no memory of the batch's size is used. The first call on a machine compiles the
    loops, which takes several seconds.

    Tensors are either all padded, (B, T), or all jagged nested tensors of the same rows, which are read in place.

    Args:
        old_log_prob: log pi_old, any float dtype; in bypass mode, these are the log-probs of the current policy.
        rollout_log_prob: log mu.
        response_mask: bool, integer or float 0/1.
        rollout_is: None, "token" or "sequence"; the weight is min(rho, upper), or rho within a pair of bounds and 0
            outside.
        rollout_is_threshold: a cap, or "lower_upper".
        rollout_is_batch_normalize: divide the weights by their mean over tokens or rows, over all ranks if
            torch.distributed is initialised; in that case, all ranks must call this function together.
        rollout_rs: None, or verl's options separated by commas.
        rollout_rs_threshold: one threshold for all options, or one per option.
    Returns:
        A DataProto with ``rollout_is_weights`` in float32 or wider, detached, 0 outside the mask, or None; the mask
        without rejected tokens, in its own dtype (the given tensor itself if nothing is rejected); and metrics under
        ``rollout_corr/``. Weights and mask have the layout of the arguments.

    Raises:
        ValueError: shapes, layouts or rows differ, no token is valid, or a threshold is malformed or missing.
    """
    tensors = (old_log_prob, rollout_log_prob, response_mask)
    rows = detect_layout(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=response_mask)
    if rollout_is not in (None, "token", "sequence"):
        raise SpecError("no such choice.", "Set one of null, token, sequence.", key="rollout_is", value=rollout_is)
    weight = _weight(rollout_is_threshold) if rollout_is else None
    options = read_verl_rejections(rollout_rs, rollout_rs_threshold, "")
    limits = {option: _limits(*bounds) for option, bounds in options.items()}
    of_tokens = {
        option: Quantity(_kind(option), *bounds) for option, bounds in limits.items() if option.startswith("token")
    }
    # verl reports the raw weights in addition to the applied weights.
    of_weight = [Quantity("raw", weight.lower, weight.upper), weight] if weight and rollout_is == "token" else []

    batch = _batch(rows, *tensors)
    columns, by_token = batch.sweep([*of_weight, *of_tokens.values()])
    filled = columns.tokens > 0
    if not filled.any():
        raise ValueError("response_mask has no token whose log-probs are finite: there is nothing to correct")
    # Slicing selects rows without a copy.
    some = slice(None) if filled.all() else filled
    tokens = columns.tokens[some]

    metrics: Metrics = {}
    weights = None
    if weight is not None:
        if of_weight:
            measures, row_values = by_token.select_quantities(slice(0, 2)), None
            total, count = measures["total"][1].sum(), columns.tokens.sum()
        else:
            measures, row_values = _of_rows(weight, columns)
            total, count = row_values[some].sum(), len(tokens)
        factor = _batch_mean(total, count, batch.device) if rollout_is_batch_normalize else 1.0
        if row_values is None:
            weights = batch.compute_token_weights(weight, factor)
        else:
            weights = batch.spread_row_weights(row_values / factor)
        measures = measures.select_rows(some)
        metrics = compute_weight_metrics(tokens, measures, *weight.bounds)
        if weight.kind == "banded":
            metrics["rollout_is_oob_ratio"] = float((measures["above"][0] + measures["below"][0]).sum() / tokens.sum())
        if rollout_is_batch_normalize:
            metrics["rollout_is_batch_norm_factor"] = factor

    mask, gone = response_mask, np.zeros(rows.count)
    rejected: Truths = np.zeros(rows.count, dtype=np.bool_)
    touched = bool((columns.tokens < columns.response).any())
    if options:
        statistics = _statistics(limits, columns, by_token.select_quantities(slice(len(of_weight), None)))
        outside = (statistics["above"] + statistics["below"]) > 0
        rejected = np.any(outside[~statistics.of_tokens], axis=0)
        touched |= bool(outside.any())
        metrics |= compute_rejection_metrics(limits, tokens, statistics.select_rows(some))
    # If nothing was rejected, the given tensor itself is returned, without a copy of the batch's size.
    if touched:
        mask, gone = batch.apply_rejections(rejected, list(of_tokens.values()))
    if options:
        # These are the shares of tokens, and of rows with a token, that all options together reject.
        metrics["rollout_rs_masked_fraction"] = float(gone[some].sum() / tokens.sum())
        metrics["rollout_rs_seq_masked_fraction"] = float((gone[some] > 0).mean())

    metrics |= compute_mismatch_metrics(columns.select_rows(some))
    return _proto(weights), mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _batch(rows: RowLayout, *tensors: Tensor) -> TorchBatch | CompiledBatch:
    """Choose the compiled backend if it can run, otherwise torch's; both compute the same numbers."""
    compiled = all(tensor.device.type == "cpu" for tensor in tensors) and _can_compile()
    return (CompiledBatch if compiled else TorchBatch)(rows, *tensors)


@functools.cache
def _can_compile() -> bool:
    return importlib.util.find_spec("numba") is not None


def _weight(threshold: str | float | None) -> Quantity:
    """Parse the threshold into the applied weight.

    A cap has no lower bound; verl's metrics compare raw weights with the inverse of the cap.
    """
    lower, upper = read_verl_weight_bounds(threshold, "rollout_is_threshold")
    floor = 1 / upper if lower is None else lower
    return Quantity("capped" if lower is None else "banded", math.log(floor), math.log(upper), (floor, upper))


def _of_rows(weight: Quantity, columns: RowSums) -> tuple[QuantitySums, Numbers]:
    """Compute raw and applied weights per sequence, and the applied weight of each row, (B,)."""
    outside = compare_with_bounds(np.stack([columns.log_ratio] * 2), np.full(2, weight.lower), np.full(2, weight.upper))
    raw = np.exp(np.clip(columns.log_ratio, -EXP_CLAMP, EXP_CLAMP))
    inside = ~(outside[0][0] | outside[1][0])
    applied = raw * inside if weight.kind == "banded" else np.minimum(raw, weight.bounds[1])
    clamp = np.full(2, weight.clamp[0]), np.full(2, weight.clamp[1])
    both = np.stack([raw, applied])
    return measure_rows(both, columns.tokens, outside, clamp=clamp, about=weight.about), applied


def _batch_mean(total: float, count: float, device: torch.device) -> float:
    """Compute the mean weight over tokens or rows of all ranks; 1 if almost no weight is left."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Sums, not means, are gathered, because the counts differ between ranks.
        parts = torch.tensor([total, count], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(parts)
        total, count = parts.tolist()
    mean = float(total / count)
    return mean if mean > _LEAST_MEAN else 1.0


def _limits(lower_ratio: float | None, upper: float) -> tuple[float, float]:
    """Convert verl's bounds to bounds of k1, k2 or k3 in nats. In verl, a pair bounds the ratio, and k1 = -log rho."""
    return (-math.inf, upper) if lower_ratio is None else (-math.log(upper), -math.log(lower_ratio))


def _kind(option: str) -> Kind:
    """Return k1, k2 or k3, with which the name of each rejection option ends."""
    return cast(Kind, option[-2:])


def _split(limits: Limits) -> tuple[Numbers, Numbers]:
    """Return the lower and the upper bounds, (m,) each."""
    lower, upper = np.array(list(limits.values())).T
    return lower, upper


def _statistics(limits: Limits, columns: RowSums, by_token: QuantitySums) -> QuantitySums:
    """Compute the statistic of each rejection option; the order is that of ``limits``."""
    of_rows = {option: bounds for option, bounds in limits.items() if not option.startswith("token")}
    if not of_rows:
        return by_token
    lower, upper = _split(of_rows)
    values = np.stack([_of_option(option, columns) for option in of_rows])
    clamp = np.where(np.isinf(lower), 0.0, lower), upper
    measures = measure_rows(values, columns.tokens, compare_with_bounds(values, lower, upper), clamp=clamp, about=0.0)
    found = [*(option for option in limits if option.startswith("token")), *of_rows]
    return by_token.concatenate(measures).select_quantities([found.index(option) for option in limits])


def _of_option(option: str, columns: RowSums) -> Numbers:
    """Compute the statistic of one rejection option per sequence, (B,)."""
    name = _kind(option)
    if "max" in option:
        return columns.k2_max if name == "k2" else columns.k3_max
    value = {"k1": -columns.log_ratio, "k2": columns.k2, "k3": columns.k3}[name]
    return value / np.maximum(columns.tokens, 1) if "mean" in option else value


def _proto(weights: Tensor | None) -> DataProto | None:
    """Wrap the weights in a DataProto, which verl's callers expect."""
    if weights is None:
        return None
    from verl.protocol import DataProto

    return DataProto.from_dict(tensors={"rollout_is_weights": weights})
