"""Score centering: removes the expected score under mu from the policy gradient (Marek and Ryabinin 2026).

If the sampler q differs from the trained policy p, E_q[f(p/q) grad log p] is not 0, so even a constant advantage moves
the policy in the same direction at every step (drift). Centering adds A C to each token's loss, with

    C = sum over the head H of sg(m(v) - a p(v)) log p(v),   m(v) = q(v) f(p(v)/q(v)),   a = rho f(1/rho)

H is the set of the sampler's K likeliest tokens at the position, and f is the factor that the correction applies to a
token. For the tokens outside H (the tail), q is approximated by rho p with rho = (1 - sum_H q) / max(1 - sum_H p,
1e-6). Without a weight, m = q and a = rho; under truncation, m = clamp(p, lower q, upper q); under a token mask, m is p
or q for kept tokens, and 0 for all other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .correction_parts import CorrectionParts
from .rules import centers_mask
from .spec import CorrectionSpec
from .stages import rollout_stage, step_stage

LEAST_TAIL = 1e-6
"""Lower limit of the policy's tail probability in the denominator of rho."""


def select_token_parts(spec: CorrectionParts) -> CorrectionSpec:
    """Select the parts of a correction that C includes: the weight, and masks that depend only on a token's own p / q.

    Example:
        >>> select_token_parts(CorrectionSpec(proximal="reuse")).is_none
        True
    """
    # If no two weights share a token and no weight depends on the advantage, there is at most one weight.
    return CorrectionSpec(
        weight=next(iter(spec.all_weights.values()), None),
        masks=tuple((name, mask) for name, mask in spec.masks if centers_mask(mask)),
    )


def compute_coefficients(spec: CorrectionParts, log_prob: Tensor, rollout_log_prob: Tensor) -> Tensor:
    """Compute m(v) - a p(v) of each token of the head: (N, K) float64, 0 outside the head.

    Args:
        log_prob: (N, K) log p, any float dtype; detached here.
        rollout_log_prob: (N, K) log q, -inf where there is no token.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.6, 0.2]]).log()
        >>> [round(each, 4) for each in compute_coefficients(CorrectionSpec(), p, q)[0].tolist()]
        [0.1, -0.1]
    """
    log_q = rollout_log_prob.double()
    head = torch.isfinite(log_q)
    log_p = torch.where(head, log_prob.detach().double(), -torch.inf)
    p, q = log_p.exp(), log_q.exp()
    rho = (1 - q.sum(-1, keepdim=True)).clamp(min=0) / (1 - p.sum(-1, keepdim=True)).clamp(min=LEAST_TAIL)
    parts = select_token_parts(spec)
    if parts.is_none:
        return torch.where(head, q - rho * p, 0.0)
    # The tail is treated as one extra token with ratio 1 / rho.
    pi = torch.cat([log_p.masked_fill(~head, 0), torch.zeros_like(rho)], -1)
    mu = torch.cat([log_q.masked_fill(~head, 0), rho.clamp(min=torch.finfo(rho.dtype).tiny).log()], -1)
    valid = torch.cat([head, rho > 0], -1)
    stage = rollout_stage(parts, old_log_prob=pi, rollout_log_prob=mu, response_mask=valid, measure="nothing")
    step = step_stage(parts, stage, log_prob=pi)
    factor = step.weight * step.keep
    return torch.where(head, q * factor[..., :-1] - rho * factor[..., -1:] * p, 0.0)


def compute_centering(log_prob: Tensor, coefficients: Tensor) -> Tensor:
    """Compute C of each position, differentiable in log p.

    Args:
        log_prob: (..., K) log p; ignored where the coefficient is 0.
        coefficients: (..., K), from ``compute_coefficients``.

    Returns:
        (...), in the dtype of ``log_prob``.

    Example:
        >>> compute_centering(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.25])).item()
        -1.0
    """
    coefficients = coefficients.to(log_prob.dtype)
    return (coefficients * torch.where(coefficients != 0, log_prob, 0.0)).sum(-1)


def compute_drift(log_prob: Tensor, coefficients: Tensor) -> Tensor:
    """Compute half the L1 norm of E_q[f grad log p] with respect to each position's logits, in float64.

    With S = sum c, the gradient of C is c(v) - S p(v) on the head and -S p(v) on the tail. Without a weight, the result
    is the total variation between p and the estimate of q, which lies in [0, 1].

    Args:
        log_prob, coefficients: see ``compute_centering``; outside the head, any value is allowed, including -inf.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
        >>> compute_drift(p, compute_coefficients(CorrectionSpec(), p, q)).round(decimals=6).item()
        0.25
    """
    p = torch.where(coefficients != 0, log_prob.detach().double(), -torch.inf).exp()
    total = coefficients.sum(-1, keepdim=True)
    tail = (1 - p.sum(-1)).clamp(min=0) * total[..., 0].abs()
    return ((coefficients - total * p).abs().sum(-1) + tail) / 2
