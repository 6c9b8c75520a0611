"""Masks: which units of tokens lie outside the band on their aggregated ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask_spec import MaskSpec
from .ratios import beyond, divergence
from .rows import RowLayout, detect_layout
from .units import Units


def outside(
    spec: MaskSpec,
    log_ratio: Tensor,
    units: Units,
    *,
    numerator: Tensor,
    denominator: Tensor,
    cutoff: float | None = None,
) -> Tensor:
    """Tokens of the units that lie outside the band, bounds inclusive.

    Aggregates are accumulated in float64 and compared in float32, as the bound's own log is, so that a unit whose
    mean or sum equals that log in float32 lies inside. With ``delta`` and a negative advantage this is off-policy
    sequence masking, mean log(mu/pi) > delta (DeepSeek-V3.2, eq. 9).

    Args:
        log_ratio: (B, T), or (N,) packed, float64, log r_t in nats, 0 off ``units.valid``.
        units: of ``spec.level``.
        numerator, denominator: of that shape, log-probs of the two policies of the ratio; read by ``binary_tv`` alone.
        cutoff: with ``second_moment``: greatest (log r)^2 that is kept, see ``second_moment_cutoff``.

    Returns:
        Bool of that shape, without meaning off ``units.valid``.
    """
    return units.spread(_outside(spec, log_ratio, units, numerator, denominator, cutoff))


def _outside(
    spec: MaskSpec, log_ratio: Tensor, units: Units, numerator: Tensor, denominator: Tensor, cutoff: float | None
) -> Tensor:
    match spec.aggregate:
        case "product":
            return _beyond(spec, units.total(log_ratio))
        case "geometric":
            return _beyond(spec, units.mean(log_ratio))
        case "any":
            return _any(units, _beyond(spec, log_ratio))
        case "binary_tv":
            gap = numerator.detach().double().exp() - denominator.detach().double().exp()
            return _any(units, _beyond(spec, gap))
        case "second_moment":
            if cutoff is None:
                raise ValueError("second_moment cuts by the batch: pass the constants of batch_constants.")
            return log_ratio.double().square() > cutoff
        case _:
            measure, reduction = spec.aggregate.split("_")
            values = torch.where(units.valid, divergence(measure, log_ratio), 0.0)
            if reduction == "max":
                greatest = units.greatest(values)
                return _beyond(spec, greatest) & (units.tokens > 0)
            return _beyond(spec, units.mean(values) if reduction == "mean" else units.total(values))


def _beyond(spec: MaskSpec, value: Tensor) -> Tensor:
    return beyond(value, *spec.limits)


def _any(units: Units, flags: Tensor) -> Tensor:
    """Whether one of the unit's tokens is flagged."""
    return flags if units.level == "token" else units.greatest(flags) > 0


def second_moment_cutoff(budget: float, log_ratio: Tensor, valid: Tensor) -> float:
    """The greatest (log r)^2 that M2PO keeps: the mean over all tokens up to it is at most ``budget``.

    Tokens of one value are kept or dropped together. Zheng et al. 2025, Prosperity before Collapse.

    Args:
        log_ratio: (B, T), 0 off ``valid``; the whole batch.

    Returns:
        -1 if no token may be kept; infinity if all may.
    """
    squares = log_ratio[valid].double().square().sort().values
    if not len(squares):
        return float("inf")
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    # Equal values stand or fall together, so a value is judged by the mean that includes all of its equals.
    last_of_equals = torch.ones_like(squares, dtype=torch.bool)
    last_of_equals[:-1] = squares[1:] != squares[:-1]
    admissible = squares[last_of_equals & (means <= budget)]
    if not len(admissible):
        return -1.0
    return float("inf") if admissible[-1] == squares[-1] else float(admissible[-1])


def applies(spec: MaskSpec, advantages: Tensor, valid: Tensor, rows: RowLayout | None = None) -> Tensor:
    """Where a mask looks: by the sign of the row's mean advantage over its valid tokens, or of each token's own.

    Args:
        advantages, valid: (B, T), or (N,) packed.
        rows: how they lie; None: padded.

    Returns:
        Bool that broadcasts against them: (B, 1) where padded and one for a whole row.
    """
    if spec.when == "any":
        return torch.ones_like(valid[..., :1])
    value = torch.where(valid, advantages.detach(), 0.0)
    if spec.sign == "row":
        rows = detect_layout(valid=valid) if rows is None else rows
        value = rows.broadcast(rows.sum(value))
    return value < 0 if spec.when == "negative" else value > 0
