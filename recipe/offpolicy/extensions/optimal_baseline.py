"""The optimal off-policy baseline as an extension that computes advantages instead of verl's estimator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from ..batch.declared_keys import Configured, choice
from ..batch.plan import BatchSplit
from ..correction import Problem
from .advantage_proof import AdvantageExtension
from .batch_view import BatchView
from .sessions import read_sessions
from .setting_checks import find_late_weights, find_no_groups, read_values

KEYS = {"over": choice("group", "leave_one_out")}


ERROR = 1e-9
"""Accepted error of an advantage, relative to the largest reward of its group, in float64."""


def compute_advantages(rewards: Tensor, energy: Tensor, *, leave_one_out: bool) -> Tensor:
    """Compute R_i - b, where b = sum_j e_j R_j / sum_j e_j over the group, or only over the siblings of i.

    Args:
        rewards: (n,) float64, the rewards of one group.
        energy: (n,) float64, squared norm of each rollout's weighted gradient: w^2 times the squared norm of its score.

    Returns:
        (n,) float64; 0 for a rollout whose comparison group has no energy, such as a group of one or a group whose
        weights are all 0.

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
    # Energies are relative to the largest, so that nothing is divided by less than 1.
    largest = of_others.amax(-1, keepdim=True)
    shares = torch.where(largest > 0, of_others / largest, 0.0)
    # Rewards are relative to the first reward, so that equal rewards result in exactly 0.
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
            return (
                f"rollout {at} of {count} has the advantage {value:.6g}, but the optimal baseline requires {wanted:.6g}"
            )
    return None


class OptimalBaseline(AdvantageExtension):
    """The optimal baseline of one run, computed from a group's rollouts or, with ``leave_one_out``, from siblings."""

    title, prefix, differs = "optimal baseline", "optimal_baseline", False

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        fix = f"Set {section}=group, or {section}=leave_one_out."
        named = ("over", "no baseline is named.", fix)
        read = read_values(section, settings, "optimal_baseline/group", KEYS, named=named)
        self.leave_one_out = read["over"] == "leave_one_out"
        self._by_length = False

    def problems(self, config: DictConfig) -> Iterator[Problem]:
        run = Configured(config, self.section)
        yield from find_no_groups(self.section, run)
        yield from find_late_weights(self.section, run)

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    def begin(self, config: DictConfig) -> None:
        self._by_length = BatchSplit.of(config, 1).loss_agg_mode == "seq-mean-token-mean"

    def estimate(self, batch: BatchView, rewards: Tensor) -> Tensor:
        sessions = read_sessions(batch)
        mask = batch.rows("response_mask")["response_mask"].bool()
        weights = batch.weigh()[0].double()
        # The proxy for the squared norm of a weighted score is the sum of its tokens' squared weights.
        of_row = torch.where(mask, weights.square(), 0.0).sum(-1)
        if self._by_length:
            of_row = of_row / mask.sum(-1).clamp(min=1).square()
        count = len(sessions.last)
        energy = torch.zeros(count, dtype=torch.float64).index_add_(0, sessions.of_row, of_row)
        gained = rewards.double().sum(-1)[sessions.last]
        dealt = torch.zeros(count, dtype=torch.float64)
        self._demanded, shifts, largest, idle = "", [], [], 0
        for name, members in sessions.groups().items():
            at = torch.tensor(members)
            of_group = gained[at], energy[at]
            dealt[at] = compute_advantages(*of_group, leave_one_out=self.leave_one_out)
            plain = [each.tolist() for each in of_group]
            self._require(name, find_difference(dealt[at].tolist(), *plain, leave_one_out=self.leave_one_out))
            total = float(energy[at].sum())
            if len(members) == 1 or total == 0:
                idle += 1
                continue
            shifts.append(abs(float((gained[at] - dealt[at]).mean() - gained[at].mean())))
            largest.append(float(energy[at].max()) / total)
            if bool(dealt[at].any()) and not self._demanded:
                self._demanded = f"group {name}: {dealt[at].tolist()}"
        self._found = {
            "optimal_baseline/shift": _mean(shifts),
            "optimal_baseline/largest_share": _mean(largest),
            "optimal_baseline/idle_groups": float(idle),
        }
        return dealt[sessions.of_row].to(rewards.dtype)[:, None] * mask

    def unproved(self) -> str | None:
        return None if self._proved else f"no group had an advantage other than 0 ({self.section}.over)."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
