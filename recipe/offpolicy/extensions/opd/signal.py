"""The teacher's signal, K1 as an advantage and K2 as a loss: formulas, columns, the workers' term, and the proof.

Let s and t be the log-probs of student and teacher for the same sampled token. K1 = s - t estimates the reverse KL, and
the gradient of K2 = (s - t)^2 / 2 estimates its gradient, (s - t) grad s (Schulman 2020, Approximating KL divergence).
The gradient of K1 does not depend on the teacher, so K1 is used as an advantage and never as a loss.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...batch.seals import hash_rows
from ...proof.rewards import check_rewards, measure_spread
from ...proof.verify import LivenessError
from ..add_on import BoundLoss, WorkerExtension
from ..batch_view import LossRows
from .settings import OpdSettings


def find_passed(rewards: Tensor, passed_above: float) -> Tensor:
    """Find the rewards above a threshold, bool. The comparison is in float32, so that a reward of 0.3 is not above 0.3.

    Example:
        >>> find_passed(torch.tensor([0.3, 0.5]).double(), 0.3)
        tensor([False,  True])
    """
    return rewards.float() > torch.tensor(passed_above, dtype=torch.float32)


def compute_pass_rates(rewards: Tensor, groups: Sequence[Hashable], *, passed_above: float) -> Tensor:
    """Compute for each rollout the share of passing rollouts in its group, (B,) float64.

    Args:
        rewards: (B,) float, one per rollout; a reward equal to ``passed_above`` does not pass.
        groups: (B,) prompt of each rollout.

    Raises:
        RewardError: a reward is not finite.
    """
    check_rewards(rewards, groups)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    group = torch.tensor([numbers[name] for name in groups], dtype=torch.int64)
    count = torch.bincount(group, minlength=len(numbers))
    return (torch.bincount(group, find_passed(rewards, passed_above).double(), len(numbers)) / count)[group]


def eligible(
    rewards: Tensor,
    groups: Sequence[Hashable],
    *,
    passed_above: float,
    max_pass_rate: float,
    rows: str = "failed",
) -> Tensor:
    """Find the rollouts to distil, (B,) bool: rollouts of prompts whose pass rate is at most ``max_pass_rate``.

    Args:
        rewards, groups, passed_above: see ``compute_pass_rates``.
        max_pass_rate: in [0, 1], inclusive.
        rows: ``failed`` selects only the failed rollouts of such prompts, ``all`` selects all of them.

    Raises:
        RewardError: a reward is not finite.

    Example:
        >>> eligible(torch.tensor([0.0, 0.0, 1.0, 1.0]), ["a", "a", "a", "b"], passed_above=0.0, max_pass_rate=0.5)
        tensor([ True,  True, False, False])
    """
    hard = compute_pass_rates(rewards, groups, passed_above=passed_above) <= max_pass_rate
    return hard if rows == "all" else hard & ~find_passed(rewards, passed_above)


LOG_PROBS = 1.0
"""Typical size of log-probs in nats. Gaps are differences of log-probs, so this is the scale of their rounding
errors."""


def find_horizon(tokens: Tensor, horizon: int | None) -> Tensor:
    """Select the first ``horizon`` tokens in each row of ``tokens``, (B, T) bool; None selects all of them."""
    return tokens if horizon is None else tokens & (tokens.cumsum(-1) <= horizon)


def compute_gaps(student: Tensor, teacher: Tensor, tokens: Tensor, *, max_gap: float) -> Tensor:
    """Compute s - t clamped to [-max_gap, max_gap], (B, T), 0 outside ``tokens``; a teacher's -inf counts as max_gap.

    Raises:
        ValueError: a log-prob in ``tokens`` is NaN.
    """
    gap = torch.where(tokens, student - teacher, 0.0)
    if torch.isnan(gap).any():
        row, place = (int(index) for index in torch.isnan(gap).nonzero()[0])
        raise ValueError(f"the gap of token {place} of row {row} is not a number: the token was not scored.")
    return gap.clamp(-max_gap, max_gap)


def compute_factor(value: float, *, start: float, end: float, final: float) -> float:
    """Compute the factor of a scheduled coefficient: 1 up to ``start``, ``final`` from ``end`` on, linear in between.

    Example:
        >>> [compute_factor(gap, start=2.0, end=1.0, final=0.5) for gap in (3.0, 1.5, 0.2)]
        [1.0, 0.75, 0.5]
    """
    return 1 + (final - 1) * min(max((value - start) / (end - start), 0.0), 1.0)


def compute_centre(gaps: Tensor, tokens: Tensor, scale: str | float) -> float:
    """Compute the value to subtract from the gaps before scaling: their mean for ``mean_std``, otherwise 0."""
    chosen = gaps[tokens].double()
    return float(chosen.mean()) if scale == "mean_std" and len(chosen) else 0.0


def compute_scale(gaps: Tensor, tokens: Tensor, scale: str | float) -> float:
    """Compute the divisor of the signal over a whole batch: the spread of ``gaps``, 1.0, or a number.

    ``mean_std`` is the standard deviation about the mean that ``compute_centre`` returns.
    ``std`` is the root mean square, because gaps are not centred: if the teacher considers all tokens less likely than
    the student does, this is part of the signal. Over n tokens, no gap exceeds sqrt(n) times ``std``. The divisor is
    1.0 if all gaps are float32 rounding errors.
    """
    if scale in ("std", "mean_std"):
        return 1 / measure_spread(gaps[tokens], centred=scale == "mean_std", size=LOG_PROBS).invert(otherwise=1.0)
    return 1.0 if scale == "none" else float(scale)


def advantages(
    base: Tensor,
    student: Tensor,
    teacher: Tensor,
    eligible_tokens: Tensor,
    *,
    coef: float,
    max_gap: float,
    scale: str | float,
    horizon: int | None = None,
    centre: float | None = None,
) -> Tensor:
    """Replace the advantages of eligible tokens with -coef (gap - centre) / scale, (B, T), where gap = s - t.

    Args:
        base: (B, T) advantages of the estimator, which stay bitwise unchanged at all other tokens.
        student, teacher: (B, T) log-probs of the sampled tokens; read only at eligible tokens within the horizon.
        eligible_tokens: (B, T) bool.
        coef: factor of the signal.
        max_gap: bound of |s - t|, in nats.
        scale: ``std``, the root mean square of the bounded gaps over the whole batch, ``mean_std``, ``none``, or a
            number; see ``compute_scale``.
        horizon: number of tokens to distil per row, counted from its first eligible token; later eligible tokens
            receive 0 and are excluded from all statistics.
        centre: value subtracted from the gaps; None: the value of ``compute_centre``.

    Raises:
        ValueError: as in ``compute_gaps``.

    Example:
        >>> base, t = torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[-1.0, -4.0, -2.0]])
        >>> on = torch.tensor([[False, True, True]])
        >>> advantages(base, torch.full((1, 3), -1.0), t, on, coef=1.0, max_gap=2.0, scale="none", horizon=1)
        tensor([[ 0.5000, -2.0000,  0.0000]])
    """
    near = find_horizon(eligible_tokens, horizon)
    gaps = compute_gaps(student.detach(), teacher, near, max_gap=max_gap)
    middle = compute_centre(gaps, near, scale) if centre is None else centre
    signal = (gaps - middle) * (-coef / compute_scale(gaps, near, scale))
    return torch.where(eligible_tokens, torch.where(near, signal, 0.0).to(base.dtype), base)


def k2_loss(student: Tensor, teacher: Tensor, mask: Tensor, *, max_gap: float) -> Tensor:
    """Compute the Huber-bounded K2 of each token, (B, T), 0 outside ``mask``.

    The loss is (s - t)^2 / 2 up to |s - t| = max_gap and linear beyond, so its slope is the clamped s - t that the
    advantages use. Gradients flow only to ``student``.

    Raises:
        ValueError: as in ``compute_gaps``.

    Example:
        >>> k2_loss(torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -9.0]), torch.tensor([True, True]), max_gap=4.0)
        tensor([ 0.5000, 24.0000])
    """
    # If the teacher excludes a token, s - t counts as max_gap.
    floor = student.detach() - max_gap
    near = torch.where(torch.isneginf(teacher), floor, teacher.detach())
    bounded = compute_gaps(student.detach(), near, mask, max_gap=max_gap)
    gap = torch.where(mask, student - near, 0.0)
    return bounded * (gap - bounded / 2)


TEACHER = "offpolicy_opd_teacher"
"""float32 per token: the teacher's log-prob; NaN where it was not requested."""
ROW = "offpolicy_opd_row"
"""int8 per row: 1 for an eligible rollout."""
FACTOR = "offpolicy_opd_factor"
"""float32 per row: the schedule's factor divided by the advantages' divisor, the same for the whole batch."""
CENTRE = "offpolicy_opd_centre"
"""float32 per row: the value subtracted from the gaps, the same for the whole batch."""
SENT = (TEACHER, ROW, FACTOR, CENTRE)
"""All columns that the loss needs."""


def find_scored(teacher: Tensor, row: Tensor, response_mask: Tensor) -> Tensor:
    """Find the tokens that the teacher scored, (B, T) bool."""
    return row.bool()[:, None] & response_mask.bool() & ~torch.isnan(teacher)


SHIFT = 0.1
"""Nats by which the trial shifts the teacher."""


@dataclass(frozen=True)
class OpdReport:
    """Evidence from one micro-batch, in plain Python; sums can be added over micro-batches and ranks.

    Attributes:
        hashes: for each row with a scored token, a hash of the token ids and the teacher's log-probs; None if a column
            is missing.
        missing: columns that did not reach the loss, or were changed on the way.
        tokens: number of scored tokens.
        response_tokens: number of response tokens of all rows, scored or not.
        kept: number of these response tokens that no mask of the correction rejects.
        k1, k2: sums over the scored tokens of clamped s - t and of its Huber loss, for the current policy.
        teacher_pull, policy_pull: sums of |gradient with respect to the log-prob| times the correction's factor, before
            division by the denominator: from the teacher's term, and from the advantages of all other tokens.
        error: in mode loss, relative error of the change in the term's gradient when the teacher is shifted by
            ``SHIFT``; in mode advantage, relative error of the advantages, compared with those computed from the
            columns.
        visible: True if the shifted trial expected a nonzero gradient, or if advantages were compared.
    """

    hashes: tuple[int, ...] | None = ()
    missing: tuple[str, ...] = ()
    tokens: int = 0
    response_tokens: int = 0
    kept: int = 0
    k1: float = 0.0
    k2: float = 0.0
    teacher_pull: float = 0.0
    policy_pull: float = 0.0
    error: float = 0.0
    visible: bool = False


@dataclass(frozen=True)
class OpdWorker(WorkerExtension):
    """The worker part: the settings, the term of mode ``loss``, and the evidence for both modes."""

    settings: OpdSettings

    @property
    def columns(self) -> Mapping[str, str]:
        return {
            TEACHER: "log-prob of the sampled token under the teacher; NaN where it was not requested",
            ROW: "1 for an eligible rollout",
        }

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        if self.settings.mode == "advantage":
            return base_loss

        def with_term(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
            loss, metrics = base_loss(model_output, data, dp_group)
            rows = LossRows(model_output, data)
            if missing := [name for name in SENT if name not in rows]:
                reason = "Some code selects the columns that go to the workers, and omits opd's columns."
                raise LivenessError(f"opd: {', '.join(missing)} did not reach the loss. {reason}")
            return loss + self.compute_term(rows, rows.log_prob, rows.column(TEACHER), actor_config), metrics

        return with_term

    def compute_term(self, rows: LossRows, log_prob: Tensor, teacher: Tensor, actor_config: Any) -> Tensor:
        """Compute coef times verl's mean of K2 over the mini-batch, a scalar."""
        scored = find_scored(teacher, rows.column(ROW), rows.response_mask)
        values = k2_loss(log_prob, teacher.to(log_prob.dtype), scored, max_gap=self.settings.max_gap)
        return self.settings.coef * rows.mean(values * self._factor(rows), actor_config)

    def _factor(self, rows: LossRows) -> Tensor:
        """The schedule's factor, multiplied by the correction's weight * keep if ``corrected`` is set."""
        weights = rows.weights.detach() if self.settings.corrected else torch.ones_like(rows.weights)
        return weights * rows.column(FACTOR)[:, None].to(weights.dtype)

    def report(self, rows: LossRows) -> OpdReport:
        missing = [name for name in SENT if name not in rows]
        if not missing and rows.column(TEACHER).dtype != torch.float32:
            missing = [f"{TEACHER} as float32 (it is {rows.column(TEACHER).dtype})"]
        if missing:
            return OpdReport(None, tuple(missing))
        teacher, mask = rows.column(TEACHER), rows.response_mask
        scored = find_scored(teacher, rows.column(ROW), mask)
        there = scored.any(-1)
        hashes = hash_rows(rows.column("responses"), scored, teacher)[there].tolist()
        log_prob = rows.log_prob.detach().float()
        gaps = compute_gaps(log_prob, teacher, scored, max_gap=self.settings.max_gap)
        k2 = k2_loss(log_prob, teacher, scored, max_gap=self.settings.max_gap)
        by_loss = self.settings.mode == "loss"
        error, visible = self._try_shift(rows, log_prob, teacher, scored) if by_loss else self._compare(rows, teacher)
        own, others = self._pulls(rows, gaps, scored)
        return OpdReport(
            tuple(hashes),
            tokens=int(scored.sum()),
            response_tokens=int(mask.sum()),
            kept=int((scored & (rows.weights != 0)).sum()),
            k1=float(gaps.double().sum()),
            k2=float(k2.double().sum()),
            teacher_pull=own,
            policy_pull=others,
            error=error,
            visible=visible,
        )

    def _pulls(self, rows: LossRows, gaps: Tensor, scored: Tensor) -> tuple[float, float]:
        """Sum |d loss / d log-prob|, without the denominator, for the teacher's term and for the advantages."""
        dealt = (rows.column("advantages").float() * rows.response_mask).abs() * rows.weights
        if self.settings.mode == "loss":
            own = self.settings.coef * gaps.abs() * self._factor(rows)
        else:
            own = torch.where(scored, dealt, 0.0)
            dealt = dealt - own
        return float(own.double().sum()), float(dealt.double().sum())

    def _try_shift(self, rows: LossRows, log_prob: Tensor, teacher: Tensor, scored: Tensor) -> tuple[float, bool]:
        """Compare how the term's gradient changes under a shifted teacher with how (s - t)^2 / 2 would change.

        Within max_gap, the slope is s - t, which decreases as t increases; the gradient of K1 would not change.
        """
        if not scored.any():  # for example because all rows are padding or have left the update
            return 0.0, False
        bound = self.settings.max_gap
        shift = min(SHIFT, bound / 4)
        inside = log_prob - (log_prob - teacher).clamp(-bound / 2, bound / 2)
        gradients = []
        for moved in (inside, inside + shift):
            with torch.enable_grad():
                leaf = log_prob.clone().requires_grad_()
                term = self.compute_term(rows, leaf, moved, rows.actor_config)
                gradients.append(torch.autograd.grad(term, leaf)[0])
        with torch.enable_grad():
            values = torch.zeros_like(log_prob, requires_grad=True)
            (mean,) = torch.autograd.grad(rows.mean(values, rows.actor_config), values)
        slope = self.settings.coef * self._factor(rows) * mean * shift
        error = (gradients[1] - gradients[0] + torch.where(scored, slope, 0.0)).abs().max()
        return float(error / slope.abs().max().clamp(min=1e-30)), bool((scored & (slope != 0)).any())

    def _compare(self, rows: LossRows, teacher: Tensor) -> tuple[float, bool]:
        """Compute the relative error of eligible rows' advantages, compared with those computed from the columns."""
        mask, settings = rows.response_mask, self.settings
        taught = rows.column(ROW).bool()[:, None] & mask
        seen = rows.column("advantages").float()
        if not taught.any():
            return 0.0, False
        factor, centre = (rows.column(name)[taught.any(-1)][0].item() for name in (FACTOR, CENTRE))
        student = rows.column("old_log_probs").float()
        # Tokens beyond the horizon were not scored, and must be 0.
        scored = taught & ~torch.isnan(teacher)
        how: dict[str, Any] = {"coef": settings.coef * factor, "max_gap": settings.max_gap, "centre": centre}
        made = advantages(torch.zeros_like(seen), student, teacher, scored, scale="none", **how)
        apart = torch.where(taught, seen - made, 0.0).abs().max()
        return float(apart / made.abs().max().clamp(min=1e-6)), True


TOLERANCE = {"loss": 1e-3, "advantage": 1e-4}
"""Largest accepted relative error of a gradient, and of an advantage, in float32."""


def check_reports(reports: Sequence[OpdReport], mode: str) -> None:
    """Check the reports of one update.

    Raises:
        LivenessError: the distillation term has no effect.
    """
    # Written this way, the check also fails for NaN.
    if wrong := [report.error for report in reports if not report.error <= TOLERANCE[mode]]:
        what = {
            "loss": "the gradient does not depend on the teacher as the gradient of (s - t)^2 / 2 would",
            "advantage": "the advantages in the loss are not coef (t - s) / scale",
        }[mode]
        reason = "Another term or estimator has replaced the distillation signal."
        raise LivenessError(f"opd: {what}: the relative error is {wrong[0]:.2g}. {reason}")


def summarize_reports(reports: Sequence[OpdReport], coef: float, epochs: int = 1) -> Mapping[str, float]:
    """Compute the workers' metrics of one update; means are NaN if no token was scored.

    Args:
        epochs: number of times that the loss received each row; metrics count each row once.
    """
    tokens = sum(report.tokens for report in reports)
    sums = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("k1", "k2", "response_tokens", "kept", "teacher_pull", "policy_pull")
    }

    def share(part: float, whole: float) -> float:
        return part / whole if whole else math.nan

    return {
        "opd/kd_coef": coef,
        "opd/num_eligible_samples": sum(len(report.hashes or ()) for report in reports) / epochs,
        "opd/k1": share(sums["k1"], tokens),
        "opd/kl_loss": share(sums["k2"], tokens),
        "opd/frac_tokens_with_kd": share(tokens, sums["response_tokens"]),
        "opd/rejected_share": share(tokens - sums["kept"], tokens),
        "opd/share_of_loss": share(sums["teacher_pull"], sums["teacher_pull"] + sums["policy_pull"]),
        "opd/live/error": max((report.error for report in reports), default=0.0),
    }
