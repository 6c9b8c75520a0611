"""Find the units whose aggregated ratio, or age, lies outside a mask's bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from .aggregates import AGGREGATES, Aggregate
from .mask_spec import MaskSpec
from .ratios import exceeds_bounds
from .row_layout import RowLayout, detect_layout
from .units import Units
from .weights import WeightSpec


def find_outside(
    spec: MaskSpec,
    log_ratio: Tensor,
    units: Units,
    *,
    numerator: Tensor,
    denominator: Tensor,
    cutoff: float | None = None,
) -> Tensor:
    """Find the tokens of the units that lie outside the band, bounds inclusive.

    Aggregates are accumulated in float64 and compared in float32, and the bound's log is rounded to float32 too, so a
    unit whose mean or sum equals that log in float32 lies inside. With ``delta`` and a negative advantage this is
    off-policy sequence masking, mean log(mu/pi) > delta (DeepSeek-V3.2, eq. 9).

    Args:
        log_ratio: (B, T), or (N,) packed, float64, log r_t in nats, 0 outside ``units.valid``.
        units: the units of level ``spec.level``.
        numerator, denominator: log-probs of the ratio's two policies, in that shape; read only by ``binary_*``
            aggregates.
        cutoff: with ``second_moment``, the greatest (log r)^2 that is kept, see ``compute_second_moment_cutoff``.

    Returns:
        Bool of that shape, meaningless outside ``units.valid``.

    Example:
        >>> from .units import partition_units
        >>> log_r, valid = torch.tensor([[0.2, 0.0], [0.0, 0.01]]).double(), torch.ones(2, 2, dtype=torch.bool)
        >>> spec = MaskSpec("rollout", "sequence", "geometric", 0.99, 1.01, "any")  # mean ratios e^0.1 and e^0.005
        >>> units = partition_units("sequence", valid, None)
        >>> find_outside(spec, log_r, units, numerator=log_r, denominator=log_r).tolist()
        [[True, True], [False, False]]
    """
    return units.spread(_outside(spec, log_ratio, units, numerator, denominator, cutoff))


def _outside(
    spec: MaskSpec, log_ratio: Tensor, units: Units, numerator: Tensor, denominator: Tensor, cutoff: float | None
) -> Tensor:
    aggregate = AGGREGATES[spec.aggregate]
    value = _by_token(aggregate, units, log_ratio, numerator, denominator)
    match aggregate.reduce:
        case "each":
            return _any(units, exceeds_bounds(value, *(_spread(units, limit) for limit in choose_limits(spec, units))))
        case "oldest":
            return _beyond(spec, units, units.oldest)
        case "batch":
            if cutoff is None:
                raise ValueError(
                    f"{aggregate.name} needs a batch cutoff: pass the constants that batch_constants returns."
                )
            return value > cutoff
        case "max":
            return _beyond(spec, units, units.greatest(value)) & units.exists
        case reduction:
            reduced = units.mean(value) if reduction == "mean" else units.total(value)
            return _beyond(spec, units, reduced if aggregate.finish is None else aggregate.finish(reduced))


def compute_extremes(
    mask: MaskSpec, units: Units, log_value: Tensor, *, numerator: Tensor, denominator: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the least and greatest values that ``find_outside`` compares with a unit's bounds; both must lie inside.

    Args:
        units: the units of level ``mask.level``.
        log_value: (B, T) float64, log r_t in nats, 0 outside ``units.valid``.
        numerator, denominator: (B, T) log-probs of the ratio's two policies; read only by ``binary_*`` aggregates.

    Returns:
        (B, U) float64 each, not yet rounded to float32 for the comparison, and in nats of log-ratio for aggregates that
        are ratios. The two values are equal except for aggregates that bound each token separately. For
        ``second_moment``, which the batch's cutoff bounds, they are (log r)^2. They are meaningless for a unit without
        a token.

    Example:
        >>> from .units import partition_units
        >>> log_r, valid = torch.tensor([[0.5, -0.25, 9.0]]).double(), torch.tensor([[True, True, False]])
        >>> spec = MaskSpec("rollout", "sequence", "any", 0.5, 2.0, "any")
        >>> units = partition_units("sequence", valid, None)
        >>> least, greatest = compute_extremes(spec, units, log_r, numerator=log_r, denominator=log_r)
        >>> least.item(), greatest.item()
        (-0.25, 0.5)
    """
    aggregate = AGGREGATES[mask.aggregate]
    value = _by_token(aggregate, units, log_value, numerator, denominator)
    match aggregate.reduce:
        case "each":
            return -units.greatest(-value), units.greatest(value)
        case "oldest":
            value = units.oldest
        case "max":
            value = units.greatest(value)
        case "mean":
            value = units.mean(value)
        case "sum":
            value = units.total(value)
    if aggregate.finish is not None:
        value = aggregate.finish(value)
    return value, value


def _by_token(aggregate: Aggregate, units: Units, log_ratio: Tensor, numerator: Tensor, denominator: Tensor) -> Tensor:
    if aggregate.token is None:
        return log_ratio
    value = aggregate.token(log_ratio, numerator, denominator)
    # A sum or mean must not include values outside the units; the other reductions already exclude these values.
    return torch.where(units.valid, value, 0.0) if aggregate.reduce in ("sum", "mean", "max") else value


def _beyond(spec: MaskSpec, units: Units, value: Tensor) -> Tensor:
    return exceeds_bounds(value, *choose_limits(spec, units))


def choose_limits(spec: MaskSpec, units: Units) -> tuple[Tensor | float, Tensor | float]:
    """Choose each unit's bounds by its age or length, in float32 as in the comparison, or return ``spec.limits``.

    Example:
        >>> from .units import partition_units
        >>> spec = MaskSpec("rollout", "token", "product", None, 1.01, "any", by_staleness=(1.0, 2.0))
        >>> ages = torch.tensor([[0.0, 1.0, 7.0]])
        >>> lower, upper = choose_limits(spec, partition_units("token", ages >= 0, None, ages=ages))
        >>> lower, [round(each, 4) for each in upper.exp()[0].tolist()]  # 1.01 and, from age 1 on, its square
        (-inf, [1.01, 1.0201, 1.0201])
    """
    if spec.by_staleness is None and spec.by_position is None:
        return spec.limits
    lower, upper = (units.scale_limit(limit, spec.by_staleness, spec.by_position) for limit in spec.limits)
    return lower, upper


def _spread(units: Units, limit: Tensor | float) -> Tensor | float:
    return units.spread(limit) if isinstance(limit, Tensor) else limit


def _any(units: Units, flags: Tensor) -> Tensor:
    """Flag units with a flagged token."""
    return flags if units.level == "token" else units.greatest(flags) > 0


def compute_second_moment_cutoff(budget: float, *log_ratios: Tensor) -> float:
    """Compute the greatest (log r)^2 that M2PO keeps, so that the mean over all kept tokens is at most ``budget``.

    Tokens with the same value are kept or dropped together. Zheng et al. 2025, Prosperity before Collapse.

    Args:
        log_ratios: log-ratios of all valid tokens in the batch, (N,) each, in any number of blocks.

    Returns:
        -1 if no token may be kept; infinity if all tokens may be kept.

    Example:
        >>> compute_second_moment_cutoff(0.5, torch.tensor([0.0, 1.0, 2.0]))  # means of squares: 0, 1/2, 5/3
        1.0
    """
    # The mean of values up to the budget is at most the budget, so only larger values, of which there are usually few,
    # must be sorted.
    within: list[tuple[Tensor, Tensor]] = []
    beyond: list[Tensor] = []
    for log_ratio in log_ratios:
        if not len(log_ratio):
            continue
        squares = log_ratio.double().square()
        above = squares > budget
        beyond.append(squares[above])
        squares = torch.where(above, 0.0, squares)
        within.append((squares.sum(), squares.amax()))
    ordered = torch.cat(beyond).sort().values if beyond else torch.zeros(0)
    if not len(ordered):
        return float("inf")
    total, greatest = (torch.stack(column) for column in zip(*within, strict=True))
    tokens_within = sum(map(len, log_ratios)) - len(ordered)
    count = torch.arange(1, len(ordered) + 1, device=ordered.device) + tokens_within
    means = (ordered.cumsum(0) + total.sum()) / count
    # Equal values are kept or dropped together, so a value is judged by the mean that includes all equal values.
    last_of_equals = torch.ones_like(ordered, dtype=torch.bool)
    last_of_equals[:-1] = ordered[1:] != ordered[:-1]
    admissible = ordered[last_of_equals & (means <= budget)]
    if not len(admissible):
        return float(greatest.max()) if tokens_within else -1.0
    return float("inf") if admissible[-1] == ordered[-1] else float(admissible[-1])


def find_applicable(
    spec: MaskSpec | WeightSpec,
    advantages: Tensor,
    valid: Tensor,
    rows: RowLayout | None = None,
    *,
    log_ratio: Tensor | None = None,
    turns: Tensor | None = None,
) -> Tensor:
    """Find the tokens to which a mask or weight applies, by the sign of row-mean or token advantages, or by turn.

    Args:
        advantages, valid: (B, T), or (N,) packed.
        rows: layout of these tensors; None: padded.
        log_ratio: log r of the mask's ratio, in their shape, 0 outside ``valid``; read only for ``when=outward``.
        turns: integers in their shape, from 0 in each row; read only for ``when=post_tool``.

    Returns:
        A bool tensor that broadcasts against ``advantages``: (B, 1) if padded and equal for a whole row.

    Example:
        >>> spec = MaskSpec("full", "token", "product", 0.5, 2.0, "negative")
        >>> advantages, valid = torch.tensor([[-3.0, 1.0], [1.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
        >>> find_applicable(spec, advantages, valid).tolist()  # row means -1 and 1
        [[True], [False]]
    """
    if spec.when == "any":
        return torch.ones_like(valid[..., :1])
    if spec.when == "post_tool":
        if turns is None:
            raise ValueError("when=post_tool without segment_ids: the turns are unknown. Pass segment_ids, (B, T).")
        return turns > 0
    value = torch.where(valid, advantages.detach(), 0.0)
    if spec.sign == "row":
        rows = detect_layout(valid=valid) if rows is None else rows
        value = rows.broadcast(rows.sum(value))
    if spec.when == "outward":
        assert log_ratio is not None, "which tokens lead away is told by their log-ratio"
        return value * log_ratio.sign() > 0
    return value < 0 if spec.when == "negative" else value > 0
