"""verl's rollout-correction helper, computed by us, for a fork of verl that wants to swap its own for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .correction.dialects.verl import verl_rejections, verl_weight_bounds
from .correction.ratios import EXP_CLAMP, divergence, exp_clamped, log_ratio, valid_tokens, weight_dtype
from .correction.spec import SpecError
from .verl_metrics import (
    Measure,
    Metrics,
    measure_rows,
    measure_tokens,
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
    metrics; a row without a token leaves the metrics.

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
        in its own dtype without what is rejected; metrics under ``rollout_corr/``.

    Raises:
        ValueError: shapes that differ, no valid token, and malformed or missing thresholds.
    """
    shapes = [tuple(tensor.shape) for tensor in (old_log_prob, rollout_log_prob, response_mask)]
    if len(set(shapes)) != 1:
        raise ValueError(f"expected old_log_prob, rollout_log_prob and response_mask of one shape, got {shapes}")
    valid = valid_tokens(response_mask, old_log_prob, rollout_log_prob)
    if not valid.any():
        raise ValueError("response_mask has no token whose log-probs are finite: there is nothing to correct")
    if rollout_is not in (None, "token", "sequence"):
        raise SpecError(f"rollout_is={rollout_is!r}: set one of null, token, sequence.")
    log_rho = log_ratio(old_log_prob, rollout_log_prob, valid)
    exact = log_rho.double()
    tokens, log_rho_sum = valid.sum(-1, dtype=torch.float64), exact.sum(-1)

    metrics: Metrics = {}
    weights = None
    if rollout_is is not None:
        bounds = verl_weight_bounds(rollout_is_threshold, "rollout_is_threshold")
        applied, metrics = _weights(exact, log_rho_sum, valid, tokens, rollout_is == "sequence", *bounds)
        if rollout_is_batch_normalize:
            factor = _mean_weight(applied, valid, tokens, rollout_is == "sequence")
            applied, metrics["rollout_is_batch_norm_factor"] = applied / factor, factor
        weights = applied.to(weight_dtype(old_log_prob, rollout_log_prob))

    keep = valid
    options = verl_rejections(rollout_rs, rollout_rs_threshold, "")
    for option, ratio_bounds in options.items():
        dropped, option_metrics = _rejection(option, exact, log_rho_sum, valid, tokens, *ratio_bounds)
        keep = keep & ~dropped
        metrics |= option_metrics
    if options:
        metrics |= total_rejection_metrics(tokens, (valid & ~keep).sum(-1, dtype=torch.float64))

    metrics |= mismatch_metrics(
        tokens,
        old_sum=_row_sum(old_log_prob, valid),
        rollout_sum=_row_sum(rollout_log_prob, valid),
        log_ratio_sum=log_rho_sum,
        k3_sum=divergence("k3", exact).sum(-1),
        chi2_sum=torch.expm1(2 * exact.clamp(-EXP_CLAMP, EXP_CLAMP)).sum(-1),
    )
    named = {f"rollout_corr/{name}": value for name, value in to_host(metrics).items()}
    return _proto(weights), torch.where(keep, response_mask, torch.zeros_like(response_mask)), named


def _weights(
    log_rho: Tensor,
    log_rho_sum: Tensor,
    valid: Tensor,
    tokens: Tensor,
    by_row: bool,
    lower: float | None,
    upper: float,
) -> tuple[Tensor, Metrics]:
    """Weights (B, T) float64 after their bounds, 0 off ``valid``, and their metrics."""
    log_value = log_rho_sum if by_row else log_rho
    # A cap has no lower bound; verl's metrics hold raw weights against its inverse.
    floor = 1 / upper if lower is None else lower
    above, below = _beyond(log_value, math.log(floor), math.log(upper))
    raw = exp_clamped(log_value)
    bounded = raw.clamp(max=upper) if lower is None else torch.where(above | below, 0.0, raw)
    open_band = (-math.inf, math.inf)

    def measured(value: Tensor) -> Measure:
        if by_row:
            return measure_rows(value, tokens, above, below, clamp=open_band, about=1.0)
        return measure_tokens(value, valid, above, below, clamp=open_band, about=1.0)

    of_raw = measured(raw)
    metrics = weight_metrics(tokens, of_raw, measured(bounded), lower=floor, upper=upper)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = (of_raw.above + of_raw.below).sum() / tokens.sum()
    spread = bounded[:, None] if by_row else bounded
    return torch.where(valid, spread, 0.0), metrics


def _mean_weight(weights: Tensor, valid: Tensor, tokens: Tensor, by_row: bool) -> Tensor:
    """Mean weight over tokens or rows, 0-dim float64; 1 where next to no weight is left."""
    if by_row:
        parts = torch.stack([weights.amax(-1).sum(), (tokens > 0).sum()])
    else:
        parts = torch.stack([weights.sum(), valid.sum()])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(parts)
    mean = parts[0] / parts[1]
    return torch.where(mean > _LEAST_MEAN, mean, 1.0)


def _rejection(
    option: str,
    log_rho: Tensor,
    log_rho_sum: Tensor,
    valid: Tensor,
    tokens: Tensor,
    lower_ratio: float | None,
    upper_bound: float,
) -> tuple[Tensor, Metrics]:
    """Tokens (B, T) or (B, 1) that one option rejects, and its metrics."""
    name = option[-2:]
    lower: float | None
    if lower_ratio is None:
        lower, upper = None, upper_bound
    else:
        lower, upper = -math.log(upper_bound), -math.log(lower_ratio)  # k1 = -log rho
    clamp = (0.0 if lower is None else lower, upper)
    values = divergence(name, log_rho)  # 0 off valid, as log_rho is
    if option.startswith("token"):
        above, below = _beyond(values, lower, upper)
        statistic = measure_tokens(values, valid, above, below, clamp=clamp, about=0.0)
        return above | below, rejection_metrics(option, tokens, statistic, lower, upper)
    if "max" in option:
        of_row = values.amax(-1)  # of k2 or k3, which are never negative
    else:
        of_row = -log_rho_sum if name == "k1" else values.sum(-1)
        of_row = of_row / tokens.clamp(min=1) if "mean" in option else of_row
    above, below = _beyond(of_row, lower, upper)
    statistic = measure_rows(of_row, tokens, above, below, clamp=clamp, about=0.0)
    return (above | below)[:, None], rejection_metrics(option, tokens, statistic, lower, upper)


def _beyond(value: Tensor, lower: float | None, upper: float) -> tuple[Tensor, Tensor]:
    """Above and below inclusive bounds in nats, compared in float32 as our masks compare them."""
    value = value.to(torch.float32)
    return value > upper, value < lower if lower is not None else torch.zeros_like(value, dtype=torch.bool)


def _row_sum(log_prob: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, log_prob.detach().double(), 0.0).sum(-1)


def _proto(weights: Tensor | None) -> DataProto | None:
    if weights is None:
        return None
    from verl.protocol import DataProto

    return DataProto.from_dict(tensors={"rollout_is_weights": weights})
