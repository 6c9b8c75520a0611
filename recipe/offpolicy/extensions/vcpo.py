"""VCPO: the optimal off-policy baseline, and a learning rate scaled by each batch's effective sample size.

The baseline is an extension that computes advantages instead of verl's estimator. The learning rate that the optimizer
used proves the scaling. Patched functions in verl 0.9.1, see ``verl_patches.worker_seams``: ``train_batch(self, data,
loss_function)`` and ``optimizer_step(self)`` of the engine's instance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from verl.utils import tensordict_utils as tu
from verl_patches import worker_seams
from verl_patches.contract import check_all
from verl_patches.execution_path import live_path

from ..batch.declared_keys import Configured, number
from ..batch.plan import BatchSplit, take_reports
from ..correction import Problem
from ..proof.verify import LivenessError
from .add_on import Advantages, Extension
from .advantage_proof import AdvantageExtension
from .batch_view import BatchView, read_sessions
from .setting_checks import SectionSettings, find_late_weights, find_no_groups

logger = logging.getLogger("verl.offpolicy")


def compute_advantages(rewards: Tensor, energy: Tensor, *, leave_one_out: bool) -> Tensor:
    """Compute R_i - b, where b = sum_j e_j R_j / sum_j e_j over the group or, leaving one out, over the siblings of i.

    Args:
        rewards: (n,) float64, the rewards of one group.
        energy: (n,) float64, squared norm of each rollout's weighted gradient: w^2 times the squared norm of its score.

    Returns:
        (n,) float64; 0 for a rollout whose baseline has a total energy of 0, for example in a group of one or if all
        weights are 0.

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


@dataclass(frozen=True)
class BaselineSettings(SectionSettings):
    """Settings of the baseline; ``over`` selects the rollouts from which it is computed."""

    option, needed = "optimal_baseline/group", "over"
    over: Literal["group", "leave_one_out"]


class OptimalBaseline(AdvantageExtension):
    """The optimal baseline of one run, computed from all rollouts of a group or, leaving one out, from the siblings."""

    title, prefix, differs = "optimal baseline", "optimal_baseline", False

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.leave_one_out = BaselineSettings.from_mapping(section, settings).over == "leave_one_out"
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
            dealt[at] = compute_advantages(gained[at], energy[at], leave_one_out=self.leave_one_out)
            total = float(energy[at].sum())
            if len(members) == 1 or total == 0:
                idle += 1
                continue
            shifts.append(abs(float((gained[at] - dealt[at]).mean() - gained[at].mean())))
            largest.append(float(energy[at].max()) / total)
            if bool(dealt[at].any()) and not self._demanded:
                self._demanded = f"group {name}: {dealt[at].tolist()}"
        self._found = {
            "optimal_baseline/shift": sum(shifts) / max(len(shifts), 1),
            "optimal_baseline/largest_share": sum(largest) / max(len(largest), 1),
            "optimal_baseline/idle_groups": float(idle),
        }
        return dealt[sessions.of_row].to(rewards.dtype)[:, None] * mask

    def unproved(self) -> str | None:
        return None if self._proved else f"no group had an advantage other than 0 ({self.section}.over)."


_MU = "actor_rollout_ref.rollout.calculate_log_probs"


@dataclass(frozen=True)
class EssLrSettings(SectionSettings):
    """Settings of the scaling: the factor is the ESS (linear) or its square root (sqrt), but at least ``floor``."""

    option, needed = "ess_lr/sqrt", "rule"
    rule: Literal["sqrt", "linear"]
    floor: Annotated[float, number("a factor in (0, 1]", most=1, above=0)]

    def compute_factor(self, ess: float) -> float:
        """Compute the factor; the result is ``floor`` if no weight is above 0.

        Example:
            >>> EssLrSettings("sqrt", 0.1).compute_factor(0.25), EssLrSettings("linear", 0.5).compute_factor(0.25)
            (0.5, 0.5)
        """
        share = ess if self.rule == "linear" else math.sqrt(ess) if ess >= 0 else math.nan
        return self.floor if math.isnan(share) else min(1.0, max(self.floor, share))


REPORT = "offpolicy_lr_report"
"""Key of the ``LrReport`` in the metrics of an update."""
FLAG = "offpolicy_lr_factor"
"""Key of the factor in a batch."""


@dataclass(frozen=True)
class LrReport:
    """The learning rates of one optimizer step on one rank, one per group of parameters.

    Attributes:
        factor: the received factor; None if no factor arrived.
        planned: the scheduler's learning rates.
        read: the optimizer's learning rates, read after its step; None if it skipped the step.
        stepped: whether the gradient was finite; verl steps only then.
    """

    factor: float | None
    planned: tuple[float, ...]
    read: tuple[float, ...] | None
    stepped: bool


class ScaledSteps:
    """Scales the learning rate of one engine; outside a step, the optimizer and the scheduler are unchanged."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._train, self._step = engine.train_batch, engine.optimizer_step
        self._factor: float | None = None
        self._read: tuple[float, ...] | None = None
        self._report: LrReport | None = None
        engine.train_batch, engine.optimizer_step = self.train_batch, self.optimizer_step
        engine.optimizer.register_step_post_hook(self._note)

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """Run verl's method, and add a report to its metrics."""
        self._factor, self._report = tu.get_non_tensor_data(data, FLAG, default=None), None
        output = self._train(data, loss_function)
        output["metrics"][REPORT] = [self._report]
        return output

    def optimizer_step(self) -> Any:
        """Run verl's method at the scheduler's rate times the factor."""
        planned = tuple(map(float, self.engine.lr_scheduler.get_last_lr()))
        groups, self._read = self.engine.optimizer.param_groups, None
        before = [group["lr"] for group in groups]
        for group, rate in zip(groups, planned, strict=True):
            group["lr"] = rate if self._factor is None else rate * self._factor
        try:
            norm = self._step()
        finally:
            # The next step and any checkpoint use the scheduler's rate.
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate
        self._report = LrReport(self._factor, planned, self._read, math.isfinite(norm))
        return norm

    def _note(self, optimizer: Any, *of_step: Any) -> None:
        self._read = tuple(float(group["lr"]) for group in optimizer.param_groups)


def scale_steps(worker: Any) -> None:
    """Make the engine of verl's actor worker scale its learning rate by the factor of each batch."""
    ScaledSteps(worker.actor.engine)


RATE_ERROR = 1e-12
"""Largest relative difference between two learning rates that count as equal."""


class EssLr(Extension):
    """Extension that scales the learning rate; ``EssLrSettings`` describes its section."""

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.ess_lr = EssLrSettings.from_mapping(section, settings)
        self._ess, self._factor, self._rate = math.nan, 1.0, math.nan
        self._proved = False

    def problems(self, config: DictConfig) -> Iterator[Problem]:
        run, path = Configured(config, self.section), live_path(config)
        if path.worker != "engine" or path.strategy not in ("fsdp", "fsdp2") or not path.attributes.scales_lr:
            reason = f"the learning rate can be scaled only in the FSDP engine of verl 0.9.1, but this run uses {path}."
            fix = f"Use verl 0.9.1 with actor_rollout_ref.actor.strategy=fsdp2, or set {self.section}=null."
            yield run.problem(self.section, reason, fix, value="on")
        if self.ess_lr.floor == 1:
            key, reason = f"{self.section}.floor", "no factor can be below 1, so the learning rate never changes."
            yield run.problem(key, reason, sets={key: 0.1}, verdict="NO-OP", value=self.ess_lr.floor)
        if run.get(_MU) is False:
            reason = "no ratio can be computed without the rollout's log-probs."
            yield run.problem(_MU, reason, f"Set {_MU}=true.", {_MU: True})
        yield from find_late_weights(self.section, run)

    @property
    def reads_old_log_prob(self) -> bool:
        return True

    def begin(self, config: DictConfig) -> None:
        check_all(worker_seams.OPTIMIZER)

    def engine_part(self) -> Callable[[Any], object]:
        return scale_steps

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        statistics = batch.weigh()[1]
        # Without a configured weight, weight/ess is computed as if all weights were 1.
        self._ess = statistics["weight/ess" if "raw_weight/ess" in statistics else "rollout_ratio/ess"].value()
        self._factor = self.ess_lr.compute_factor(self._ess)

    def batch_flags(self) -> Mapping[str, Any]:
        return {FLAG: self._factor}

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        reports = take_reports(metrics, REPORT)
        if (wrong := find_wrong_rate(reports, self._factor)) is not None:
            raise LivenessError(f"{self.section}: {wrong}.")
        rates = [rate for report in reports for rate in report.read or ()]
        self._rate = rates[0] if rates else math.nan
        if not self._proved and self._factor < 1 and any(rates):
            self._proved = True
            logger.info("learning rate scaled by ESS: LIVE, factor %.4g at an ESS of %.4g", self._factor, self._ess)

    def unproved(self) -> str | None:
        idle = f"no update had both a factor below 1 and a learning rate above 0 ({self.section}.rule)."
        return None if self._proved else idle

    def metrics(self) -> Mapping[str, float]:
        return {"ess_lr/ess": self._ess, "ess_lr/factor": self._factor, "ess_lr/lr": self._rate}


def find_wrong_rate(reports: Sequence[Any], factor: float) -> str | None:
    """Describe a step of an update that did not use the scheduler's rate times ``factor``; None if there is none."""
    if not reports or None in reports:
        return "an update reported no step of verl's optimizer, so its learning rate is unknown"
    for report in reports:
        if report.factor != factor:
            return f"the worker received the factor {report.factor}, but the trainer computed {factor}"
        if report.read is None:
            if report.stepped:
                return "the engine's optimizer did not step, although the gradient is finite"
            continue
        for planned, read in zip(report.planned, report.read, strict=True):
            if not math.isclose(read, planned * factor, rel_tol=RATE_ERROR):
                due = f"{planned * factor:.6g}, the scheduler's rate times {factor:.6g}"
                return f"the optimizer stepped at a learning rate of {read:.6g} instead of {due}"
    return None
