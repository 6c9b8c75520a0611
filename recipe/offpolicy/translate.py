"""verl's rollout-correction helper, computed by us, for a fork of verl that wants to swap its own for it."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .correction.dialects.verl import verl_rejections, verl_weight_bounds
from .correction.ratios import exp_clamped
from .correction.spec import SpecError
from .verl_helper.by_torch import TorchBatch, beyond
from .verl_helper.columns import Batch, Columns, Kind, Measure, Quantity, measure_rows
from .verl_helper.metrics import (
    Metrics,
    mismatch_metrics,
    rejection_metrics,
    to_host,
    total_rejection_metrics,
    weight_metrics,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto

_LEAST_MEAN = 1e-8  # below it verl does not normalise


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
    """Weights, mask and metrics as verl's ``compute_rollout_correction_and_rejection_mask`` names them.

    Sums are float64, and no padded position is read. A token whose log-prob is not finite leaves weights, mask and
    metrics; a row without a token leaves the metrics. On the CPU, where numba is installed, each row is read once and
    nothing of the batch's size is made but what is returned.

    Args:
        old_log_prob: (B, T) log pi_old, any float dtype; in bypass mode the current policy's.
        rollout_log_prob: (B, T) log mu.
        response_mask: (B, T) bool, integer or float 0/1.
        rollout_is: None, "token" or "sequence": min(rho, upper), or 0 outside a pair of bounds.
        rollout_is_threshold: a cap, or "lower_upper".
        rollout_is_batch_normalize: divide the weights by their mean over tokens or rows, of all ranks where
            torch.distributed runs; ranks have to call together then.
        rollout_rs: None, or verl's options separated by commas.
        rollout_rs_threshold: one for all of them, or one each.

    Returns:
        A DataProto with ``rollout_is_weights`` (B, T) in float32 or wider, detached, 0 off the mask, or None; the mask
        in its own dtype without what is rejected, which is the given tensor where that is nothing; metrics under
        ``rollout_corr/``.

    Raises:
        ValueError: shapes that differ, no valid token, and malformed or missing thresholds.
    """
    shapes = [tuple(tensor.shape) for tensor in (old_log_prob, rollout_log_prob, response_mask)]
    if len(set(shapes)) != 1:
        raise ValueError(f"expected old_log_prob, rollout_log_prob and response_mask of one shape, got {shapes}")
    if rollout_is not in (None, "token", "sequence"):
        raise SpecError(f"rollout_is={rollout_is!r}: set one of null, token, sequence.")
    weight = _weight(rollout_is_threshold) if rollout_is else None
    options = verl_rejections(rollout_rs, rollout_rs_threshold, "")
    limits = {option: _limits(option, *bounds) for option, bounds in options.items()}
    by_token = [_of_token(option, *limits[option]) for option in options if option.startswith("token")]

    batch = _batch(old_log_prob, rollout_log_prob, response_mask)
    of_weight = [Quantity("raw", weight.lower, weight.upper), weight] if weight and rollout_is == "token" else []
    columns, measures = batch.sweep([*of_weight, *by_token])
    if not columns.tokens.any():
        raise ValueError("response_mask has no token whose log-probs are finite: there is nothing to correct")

    metrics: Metrics = {}
    weights = None
    if weight is not None:
        if of_weight:
            raw, applied = measures[:2]
            factor = _batch_mean(applied.total, columns.tokens) if rollout_is_batch_normalize else None
            weights = batch.token_weights(weight, 1.0 if factor is None else factor)
        else:
            raw, applied, rows = _of_rows(weight, columns)
            factor = (
                _batch_mean(rows * (columns.tokens > 0), columns.tokens > 0) if rollout_is_batch_normalize else None
            )
            weights = batch.row_weights(rows if factor is None else rows / factor)
        metrics = weight_metrics(columns.tokens, raw, applied, lower=weight.bounds[0], upper=weight.bounds[1])
        if weight.kind == "banded":
            metrics["rollout_is_oob_ratio"] = (raw.above + raw.below).sum() / columns.tokens.sum()
        if factor is not None:
            metrics["rollout_is_batch_norm_factor"] = factor

    of_tokens = iter(measures[len(of_weight) :])
    rejected = torch.zeros_like(columns.tokens, dtype=torch.bool)
    for option, (lower, upper) in limits.items():
        if option.startswith("token"):
            measure = next(of_tokens)
        else:
            measure = _of_option(option, columns, lower, upper)
            rejected |= (measure.above + measure.below) > 0
        metrics |= rejection_metrics(option, columns.tokens, measure, lower, upper)
    mask, gone = response_mask, torch.zeros_like(columns.tokens)
    touched = any(bool((measure.above + measure.below).any()) for measure in measures[len(of_weight) :])
    if touched or bool(rejected.any()) or bool((columns.tokens < columns.response).any()):
        mask, gone = batch.kept(rejected, by_token)
    if options:
        metrics |= total_rejection_metrics(columns.tokens, gone)

    metrics |= mismatch_metrics(columns)
    named = {f"rollout_corr/{name}": value for name, value in to_host(metrics).items()}
    return _proto(weights), mask, named


def _batch(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Batch:
    """Compiled loops where they can run; both give the same numbers."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in (old_log_prob, rollout_log_prob, response_mask))
    if on_cpu and importlib.util.find_spec("numba"):
        from .verl_helper.by_sweep import SweptBatch

        return SweptBatch(old_log_prob, rollout_log_prob, response_mask)
    return TorchBatch(old_log_prob, rollout_log_prob, response_mask)


def _weight(threshold: str | float | None) -> Quantity:
    """The weight as it is applied. A cap has no lower bound; verl's metrics hold raw weights against its inverse."""
    lower, upper = verl_weight_bounds(threshold, "rollout_is_threshold")
    floor = 1 / upper if lower is None else lower
    return Quantity("capped" if lower is None else "banded", math.log(floor), math.log(upper), (floor, upper))


def _of_rows(weight: Quantity, columns: Columns) -> tuple[Measure, Measure, Tensor]:
    """Raw and applied weights by sequence, and the applied one of each row, (B,)."""
    above, below = beyond(columns.log_ratio, weight.lower, weight.upper)
    raw = exp_clamped(columns.log_ratio)
    applied = torch.where(above | below, 0.0, raw) if weight.kind == "banded" else raw.clamp(max=weight.bounds[1])
    of_raw, of_applied = (
        measure_rows(value, columns.tokens, above, below, clamp=weight.clamp, about=weight.about)
        for value in (raw, applied)
    )
    return of_raw, of_applied, applied


def _batch_mean(total: Tensor, count: Tensor) -> Tensor:
    """Mean weight over tokens or rows, 0-dim float64; 1 where next to no weight is left."""
    parts = torch.stack([total.sum(), count.sum().double()])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(parts)
    mean = parts[0] / parts[1]
    return torch.where(mean > _LEAST_MEAN, mean, 1.0)


def _limits(option: str, lower_ratio: float | None, upper: float) -> tuple[float | None, float]:
    """Bounds of k1, k2 or k3 in nats; verl's pairs are of the ratio, and k1 = -log rho."""
    return (None, upper) if lower_ratio is None else (-math.log(upper), -math.log(lower_ratio))


def _of_token(option: str, lower: float | None, upper: float) -> Quantity:
    kinds: dict[str, Kind] = {"k1": "k1", "k2": "k2", "k3": "k3"}
    return Quantity(kinds[option[-2:]], -math.inf if lower is None else lower, upper)


def _of_option(option: str, columns: Columns, lower: float | None, upper: float) -> Measure:
    """The statistic of one rejection option by sequence."""
    name = option[-2:]
    if "max" in option:
        value = columns.k2_max if name == "k2" else columns.k3_max
    else:
        value = {"k1": -columns.log_ratio, "k2": columns.k2, "k3": columns.k3}[name]
        value = value / columns.tokens.clamp(min=1) if "mean" in option else value
    above, below = beyond(value, -math.inf if lower is None else lower, upper)
    clamp = (0.0 if lower is None else lower, upper)
    return measure_rows(value, columns.tokens, above, below, clamp=clamp, about=0.0)


def _proto(weights: Tensor | None) -> DataProto | None:
    if weights is None:
        return None
    from verl.protocol import DataProto

    return DataProto.from_dict(tensors={"rollout_is_weights": weights})
