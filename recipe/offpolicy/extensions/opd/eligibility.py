"""Eligible rollouts: failed rollouts of prompts with a low pass rate."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ...batch.rewards import check_rewards


def find_passed(rewards: Tensor, passed_above: float) -> Tensor:
    """Find the rewards above a threshold, bool; compared in float32, where 0.3 is not above 0.3.

    Example:
        >>> find_passed(torch.tensor([0.3, 0.5]).double(), 0.3)
        tensor([False,  True])
    """
    return rewards.float() > torch.tensor(passed_above, dtype=torch.float32)


def compute_pass_rates(rewards: Tensor, groups: Sequence[Hashable] | Tensor, *, passed_above: float) -> Tensor:
    """Compute the share of each rollout's group that passes, (B,) float64.

    Args:
        rewards: (B,) float, one per rollout; a reward exactly at ``passed_above`` does not pass.
        groups: (B,) prompt of each rollout.

    Raises:
        ValueError: a reward is not finite, or the number of groups differs.
    """
    names = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if rewards.dim() != 1 or len(names) != len(rewards):
        raise ValueError(f"{tuple(rewards.shape)} rewards for {len(names)} groups: expected one of each per rollout.")
    check_rewards(rewards, names)
    if not math.isfinite(passed_above):
        raise ValueError(f"passed_above={passed_above}: not a finite number.")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    group = torch.tensor([numbers[name] for name in names], dtype=torch.int64, device=rewards.device)
    count = torch.zeros(len(numbers), dtype=torch.float64, device=rewards.device)
    passed = count.index_add(0, group, find_passed(rewards, passed_above).double())
    return (passed / count.index_add(0, group, torch.ones_like(group, dtype=torch.float64)))[group]


def eligible(
    rewards: Tensor,
    groups: Sequence[Hashable] | Tensor,
    *,
    passed_above: float,
    max_pass_rate: float,
    rows: str = "failed",
) -> Tensor:
    """Find the rollouts to distil: those of prompts whose pass rate is at most ``max_pass_rate``, (B,) bool.

    Args:
        rewards, groups, passed_above: see ``compute_pass_rates``.
        max_pass_rate: in [0, 1], inclusive.
        rows: only the ``failed`` rollouts of such prompts, or ``all`` of theirs.

    Raises:
        ValueError: as ``compute_pass_rates``, or a setting is out of its range.

    Example:
        >>> eligible(torch.tensor([0.0, 0.0, 1.0, 1.0]), ["a", "a", "a", "b"], passed_above=0.0, max_pass_rate=0.5)
        tensor([ True,  True, False, False])
    """
    if not 0 <= max_pass_rate <= 1:
        raise ValueError(f"max_pass_rate={max_pass_rate}: not in [0, 1].")
    if rows not in ("failed", "all"):
        raise ValueError(f"rows={rows}: not one of failed, all.")
    hard = compute_pass_rates(rewards, groups, passed_above=passed_above) <= max_pass_rate
    return hard if rows == "all" else hard & ~find_passed(rewards, passed_above)
