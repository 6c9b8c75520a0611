"""Partial sums for the decomposition of log pi/mu; they add up over rows, micro-batches and ranks.

Per token, in nats: total L = log pi - log mu, gap G = log pi_old - log mu, drift L - G. A token is *fresh* if the
weights at the start of its step sampled it: then G is the backend's. In a *stale* token G is backend plus staleness,
which can be separated only with fresh tokens of the same probability.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from ...correction.ratios import compute_divergence

EDGES: Final = (-6.907755278982137, -4.605170185988091, -2.302585092994046, -0.6931471805599453, -0.10536051565782628)
"""Upper edges of the bins of probability, in log mu: 0.001, 0.01, 0.1, 0.5, 0.9."""
BINS: Final = ("< 0.001", "0.001-0.01", "0.01-0.1", "0.1-0.5", "0.5-0.9", "> 0.9")
"""Probability under mu, by bin; mu is closer than pi_old to the weights that sampled a stale token."""

AGES: Final = ("fresh", "stale", "unknown")
COLUMNS: Final = ("tokens", "total", "total_square", "gap", "gap_square", "gap_total", "gap_k3", "total_k3")
"""n, sum L, sum L^2, sum G, sum G^2, sum G L, sum k3(G), sum k3(L), with k3(x) = exp(x) - 1 - x."""
SHAPE: Final = (len(AGES), len(BINS), len(COLUMNS))


@torch.no_grad()
def compute_sums_by_row(
    rollout_log_prob: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    response_mask: Tensor,
    staleness: Tensor | None,
) -> Tensor:
    """Compute the sums of each row.

    Args:
        rollout_log_prob, old_log_prob, log_prob: (B, T) log mu, log pi_old, log pi, any float dtype.
        response_mask: (B, T) bool or 0/1; a token with a log-prob that is not finite is excluded.
        staleness: (B,) integers, or (B, T) per token, steps from the weights that sampled to those at the start of the
            step, below 0 if unknown; None: unknown for all rows.

    Returns:
        (B, *SHAPE) float64.
    """
    mu = rollout_log_prob.detach().double()
    differences = torch.stack((log_prob.detach() - mu, old_log_prob.detach() - mu))
    # Both are finite if all three log-probs are; a number minus itself is 0 only if it is finite.
    valid = response_mask.bool() & (differences - differences == 0).all(0)
    differences = torch.where(valid, differences, 0.0)
    squares, k3 = differences.square(), compute_divergence("k3", differences)
    total, gap = differences.unbind()
    columns = torch.stack(
        [valid.double(), total, squares[0], gap, squares[1], gap * total, k3[1], k3[0]],
        dim=-1,
    )
    rows, ages, bins, width = len(valid), *SHAPE
    # Columns are 0 where tokens are not valid, so their bin does not matter.
    place = torch.bucketize(mu, _edges(valid.device), right=True)
    if staleness is None:
        age = torch.full((rows, 1), AGES.index("unknown"), device=valid.device)
    else:
        known = staleness.to(valid.device).reshape(rows, -1)
        age = torch.where(known < 0, AGES.index("unknown"), (known > 0).long())
    place = place + bins * (age + ages * torch.arange(rows, device=valid.device)[:, None])
    sums = torch.zeros(rows * ages * bins, width, dtype=torch.float64, device=valid.device)
    sums.index_add_(0, place.flatten(), columns.reshape(-1, width))
    return sums.reshape(rows, *SHAPE)


@cache
def _edges(device: torch.device) -> Tensor:
    return torch.tensor(EDGES, dtype=torch.float64, device=device)
