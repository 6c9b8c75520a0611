"""What score centering must do to the gradient, stated without its code, and the policies under which it is tried."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..correction import CorrectionSpec, MaskSpec, WeightSpec
from .trials import list_bounds

_LEAST_TAIL = 1e-6


def expect_coefficients(spec: CorrectionSpec, log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """Expect the gradient of C at log p of the likeliest tokens, m(v) - a p(v): (..., K) float64.

    Args:
        log_prob, rollout_log_prob: (..., K) log p and log q; log q is -inf where there is no token.
    """
    q = rollout_log_prob.double().exp()
    p = torch.where(q > 0, log_prob.detach().double().exp(), 0.0)
    rho = (1 - q.sum(-1, keepdim=True)).clamp(min=0) / (1 - p.sum(-1, keepdim=True)).clamp(min=_LEAST_TAIL)
    # For each token the pair of its masses; the tail's are 1 and rho.
    m = _weigh(spec, torch.cat([p, torch.ones_like(rho)], -1), torch.cat([q, rho], -1))
    return torch.where(q > 0, m[..., :-1] - m[..., -1:] * p, 0.0)


def _weigh(spec: CorrectionSpec, p: Tensor, q: Tensor) -> Tensor:
    """Compute q f(p / q), 0 where q is 0."""
    there = q > 0
    ratio = torch.where(there, p / q, 1.0)
    m = q if spec.weight is None else _weigh_by(spec.weight, ratio, p, q)
    for _, mask in spec.masks:
        m = torch.where(_keeps(mask, ratio), m, 0.0)
    return torch.where(there, m, 0.0)


def _weigh_by(weight: WeightSpec, ratio: Tensor, p: Tensor, q: Tensor) -> Tensor:
    lower, upper = weight.lower or 0.0, math.inf if weight.upper is None else weight.upper
    if weight.power is not None and weight.rate is not None:
        return q * torch.exp(weight.rate * (1 - ratio)) * ratio**weight.power
    if weight.kind == "reject":
        return torch.where((ratio >= lower) & (ratio <= upper), p, 0.0)
    return p.clamp(min=lower * q, max=upper * q)


def _keeps(mask: MaskSpec, ratio: Tensor) -> Tensor:
    """Tell the ratios of single tokens that the mask keeps."""
    log_ratio = ratio.log()
    match mask.aggregate.split("_")[0]:
        case "k1":
            value = -log_ratio
        case "k2":
            value = log_ratio.square() / 2
        case "k3":
            value = ratio - 1 - log_ratio
        case "tv":
            value = (ratio - 1).abs() / 2
        case "exp":
            value = log_ratio.abs()
        case _:
            value = log_ratio
    kept = torch.ones_like(ratio, dtype=torch.bool)
    for side, bound in list_bounds(mask):
        kept &= value * side <= bound * side
    return kept


def place_masses(spec: CorrectionSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Place p and q of the likeliest tokens beyond and inside each bound of the correction: their logs, float32.

    Args:
        like: (..., K), shape of the result.
    """
    ratios = []
    for each in (spec.weight, *(mask for _, mask in spec.masks)):
        for bound in (None if each is None else each.upper, None if each is None else each.lower):
            if bound is not None and 0 < bound < 1e3:
                ratios += [1.3 * bound, bound / 1.3]
    ratios += [1.7, 0.6, 1.0]
    count = like.shape[-1]
    # Positions begin with another ratio each, so that few tokens show all bounds.
    turns = torch.arange(like.numel() // count)[:, None] + torch.arange(count)
    table = torch.tensor(ratios, dtype=torch.float64)[turns % len(ratios)].view(like.shape)
    # The masses of both sum to less than 1/2.
    p = torch.full_like(table, min(0.4, 0.4 * min(ratios)) / count)
    return p.log().float(), (p / table).log().float()
