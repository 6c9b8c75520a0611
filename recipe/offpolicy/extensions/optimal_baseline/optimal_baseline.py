"""The optimal off-policy baseline as an extension: advantages instead of verl's estimator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from ...batch.plan import BatchSplit
from ...correction import Problem
from ...proof.verify import LivenessError
from ..advantage_proof import AdvantageExtension, AdvantageWorker
from ..batch_view import BatchView
from ..sessions import read_sessions
from .formula import compute_advantages, find_difference
from .settings import BaselineSettings, find_problems


class OptimalBaseline(AdvantageExtension):
    """The optimal baseline of one run; see ``settings.BaselineSettings`` for its section."""

    title, prefix, differs = "optimal baseline", "optimal_baseline", False

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.leave_one_out = BaselineSettings.from_mapping(section, settings).over == "leave_one_out"
        self._by_length = False

    def problems(self, config: DictConfig) -> Sequence[Problem]:
        return tuple(find_problems(self.section, config))

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    def begin(self, config: DictConfig) -> None:
        self._by_length = BatchSplit.of(config, 1).loss_agg_mode == "seq-mean-token-mean"

    def estimate(self, batch: BatchView, rewards: Tensor) -> Tensor:
        sessions = read_sessions(batch)
        mask = batch.rows("response_mask")["response_mask"].bool()
        weights = batch.weigh()[0].double()
        # The proxy of a score's squared norm is its number of tokens, each with the square of its weight.
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
            wrong = find_difference(dealt[at].tolist(), *plain, leave_one_out=self.leave_one_out)
            if wrong is not None:
                raise LivenessError(f"{self.section}: in group {name} {wrong}.")
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

    def worker(self) -> AdvantageWorker:
        return AdvantageWorker()

    def unproved(self) -> str | None:
        return None if self._proved else f"no group had an advantage other than 0 ({self.section}.over)."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
