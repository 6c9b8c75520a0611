"""Advantages over the baseline that minimises the variance of a group's weighted gradient (arXiv 2602.17616)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ERROR = 1e-9
"""Accepted error of an advantage, relative to the largest reward of its group, in float64."""


def compute_advantages(rewards: Tensor, energy: Tensor, *, leave_one_out: bool) -> Tensor:
    """Compute R_i - b, b = sum_j e_j R_j / sum_j e_j over the group, or over the siblings of i alone.

    Args:
        rewards: (n,) float64, of one group.
        energy: (n,) float64, squared norm of each rollout's weighted gradient, w^2 times that of its score.

    Returns:
        (n,) float64; 0 for a rollout that is compared with no energy: a group of one, or of weights of 0.

    Example:
        >>> rewards, energy = torch.tensor([1.0, 0.0]).double(), torch.tensor([3.0, 1.0]).double()
        >>> compute_advantages(rewards, energy, leave_one_out=False).tolist()  # b = 3 / 4
        [0.25, -0.75]
        >>> compute_advantages(rewards, energy, leave_one_out=True).tolist()
        [1.0, -1.0]
    """
    count = len(rewards)
    of_others = energy.expand(count, count).clone()
    if leave_one_out:
        of_others.fill_diagonal_(0.0)
    # Relative to the largest, so that nothing is divided by less than 1.
    largest = of_others.amax(-1, keepdim=True)
    shares = torch.where(largest > 0, of_others / largest, 0.0)
    # From the first reward on, so that equal rewards give exactly 0.
    above = rewards - rewards[0]
    baseline = (shares * above).sum(-1) / shares.sum(-1).clamp(min=1.0)
    return torch.where(largest[:, 0] > 0, above - baseline, 0.0)


def find_difference(
    seen: Sequence[float], rewards: Sequence[float], energy: Sequence[float], *, leave_one_out: bool
) -> str | None:
    """Compare one group's advantages with a second implementation, which shares no code; None if they agree."""
    count = len(rewards)
    for at, value in enumerate(seen):
        others = [j for j in range(count) if not leave_one_out or j != at]
        most = max((energy[j] for j in others), default=0.0)
        wanted = 0.0
        if most > 0:
            whole = math.fsum(energy[j] / most for j in others)
            wanted = math.fsum(energy[j] / most * (rewards[at] - rewards[j]) for j in others) / whole
        if not abs(value - wanted) <= ERROR * max(1.0, *map(abs, rewards)):
            return f"rollout {at} of {count} has {value:.6g}, but the optimal baseline requires {wanted:.6g}"
    return None
