"""The worker part of on-policy distillation, K2 in addition to the policy loss, and the proof of what arrived."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ...batch.seals import hash_rows
from ...proof.rollout_log_probs import LEAST_TOKENS, UNSURE, Column, check_arrived, check_zeros
from ...proof.token_alignment import AlignmentChecker
from ...proof.verify import LivenessError
from ..add_on import BoundLoss, WorkerExtension
from ..loss_rows import LossRows
from .settings import OpdSettings
from .signal import CENTRE, FACTOR, ROW, SENT, TEACHER, advantages, compute_gaps, describe_missing, find_scored, k2_loss

SHIFT = 0.1
"""Nats by which the trial shifts the teacher."""


@dataclass(frozen=True)
class OpdReport:
    """Evidence from one micro-batch, in plain Python; its sums add up over micro-batches and ranks.

    Attributes:
        hashes: for each row with a scored token, a hash of the ids and the bits of the teacher's log-probs; None if a
            column is missing.
        missing: columns that did not reach the loss, or were changed on the way.
        tokens: number of scored tokens.
        response_tokens: number of response tokens of all rows, scored or not.
        kept: number of these response tokens that no mask of the correction rejects.
        k1, k2: sums of bounded s - t and of its Huber loss over the scored tokens, at the current policy.
        teacher_pull, policy_pull: sums of |gradient at the log-prob| times the correction's factor, before division by
            the denominator: for the scored tokens' own term, and for the advantages of all other tokens.
        error: in mode loss, relative error of the change in the term's gradient when the teacher is shifted by
            ``SHIFT``; in mode advantage, relative error of the advantages compared with those computed from the
            columns; otherwise None.
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
    """Settings that are sent to the workers, with the term of mode ``loss`` and the evidence of both modes."""

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
            arrived = [name for name in SENT if name in rows]
            if len(arrived) < len(SENT):
                raise LivenessError(describe_missing(arrived))
            return loss + self.compute_term(rows, rows.log_prob, rows.column(TEACHER), actor_config), metrics

        return with_term

    def compute_term(self, rows: LossRows, log_prob: Tensor, teacher: Tensor, actor_config: Any) -> Tensor:
        """Compute coef times verl's mean of K2 over the mini-batch, a scalar."""
        scored = find_scored(teacher, rows.column(ROW), rows.response_mask)
        values = k2_loss(log_prob, teacher.to(log_prob.dtype), scored, max_gap=self.settings.max_gap)
        return self.settings.coef * rows.mean(values * self._factor(rows), actor_config)

    def _factor(self, rows: LossRows) -> Tensor:
        """The schedule's factor, multiplied by the correction's weight * keep if the correction acts on the term."""
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
        error, visible = (
            self._try_shift(rows, log_prob, teacher, scored)
            if self.settings.mode == "loss"
            else self._compare(rows, teacher)
        )
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
        """Sum |slope of the loss| at each log-prob, without the denominator, for the teacher's term and advantages."""
        dealt = (rows.column("advantages").float() * rows.response_mask).abs() * rows.weights
        if self.settings.mode == "loss":
            own = self.settings.coef * gaps.abs() * self._factor(rows)
        else:
            own = torch.where(scored, dealt, 0.0)
            dealt = dealt - own
        return float(own.double().sum()), float(dealt.double().sum())

    def _try_shift(self, rows: LossRows, log_prob: Tensor, teacher: Tensor, scored: Tensor) -> tuple[float, bool]:
        """Compare the change in the term's gradient under a shifted teacher with that of (s - t)^2 / 2.

        Within max_gap, the slope is s - t, which decreases as t increases. The gradient of K1 would not change.
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
        """Compare the advantages of eligible rows with those computed from the columns; the error is relative."""
        mask, settings = rows.response_mask, self.settings
        taught = rows.column(ROW).bool()[:, None] & mask
        seen = rows.column("advantages").float()
        if not taught.any():
            return 0.0, False
        factor, centre = (rows.column(name)[taught.any(-1)][0].item() for name in (FACTOR, CENTRE))
        student = rows.column("old_log_probs").float()
        # Tokens beyond the horizon were not scored, and must be 0.
        scored = taught & ~torch.isnan(teacher)
        made = advantages(
            torch.zeros_like(seen),
            student,
            teacher,
            scored,
            coef=settings.coef * factor,
            max_gap=settings.max_gap,
            scale="none",
            centre=centre,
        )
        apart = torch.where(taught, seen - made, 0.0).abs().max()
        return float(apart / made.abs().max().clamp(min=1e-6)), True


TOLERANCE = {"loss": 1e-3, "advantage": 1e-4}
"""Largest accepted relative error of a gradient, and of an advantage, in float32."""
COLUMN = Column("the teacher's log-probs", "Check the log of the server in opd.teacher.url.", LivenessError)
ROUNDING = 2.0**-22
"""Relative difference up to which two log-probs count as the same number in float32."""
APART, APART_ALONE, MOST_APART = 0.1, 0.3, 5.0
"""In nats: the limit of the mean difference between two scores of a long row, the amount added for a single token, and
the cap on one token's difference."""


def check_reports(reports: Sequence[OpdReport], mode: str) -> None:
    """Check the reports of one update.

    Raises:
        LivenessError: the distillation term does not act.
    """
    # Written this way, the check also fails for NaN.
    if wrong := [report.error for report in reports if not report.error <= TOLERANCE[mode]]:
        what = (
            "the gradient does not depend on the teacher as the gradient of (s - t)^2 / 2 does"
            if mode == "loss"
            else "the advantages in the loss are not coef (t - s) / scale"
        )
        raise LivenessError(
            f"opd: {what}: the relative error is {wrong[0]:.2g}. Another term or estimator has replaced the "
            "distillation signal."
        )


def check_teacher(student: Tensor, teacher: Tensor, scored: Tensor) -> None:
    """Check from the values of the teacher's scores that they can be log-probs of a policy other than the student.

    Args:
        student: (B, T) log pi_old.
        teacher: (B, T), -inf where the teacher excludes a token.
        scored: (B, T) bool.

    Raises:
        LivenessError: values are zeros, all equal, mostly not finite, above 0, or bitwise the student's in float32.
    """
    check_arrived(teacher, scored, COLUMN)
    check_zeros(teacher, student, scored, COLUMN)
    unsure = scored & (student < -UNSURE)
    apart = (student - teacher).abs() > ROUNDING * student.abs().clamp(min=1.0)
    if int(unsure.sum()) >= LEAST_TOKENS and not (apart & unsure).any():
        raise LivenessError(
            f"opd: the teacher's log-probs of {int(scored.sum())} tokens equal log pi_old, so the teacher is the "
            "student itself and teaches nothing. Fix: set opd.teacher.url to the teacher's server."
        )


def _compute_unrelated_limit(rows: int) -> float:
    """Compute the concordance below which scores of this many rows carry no information about their tokens.

    The concordance expected by chance is 0, with a standard deviation of about 0.7 / sqrt(rows). A teacher may disagree
    about most tokens of failed rows; one teacher that improved its student had a concordance of 0.17 on such rows.
    """
    return 0.12 - 2.8 / math.sqrt(rows)


def build_alignment(*, allow_unrelated: bool) -> AlignmentChecker:
    """Build the checker of the teacher's log-probs against the student's."""
    return AlignmentChecker(
        allow_unrelated,
        _compute_unrelated_limit,
        1024,
        "the teacher's log-probs",
        "the teacher",
        "the teacher teaches nothing about these tokens; compare its vocabulary and chat template with the student's",
    )


def check_repeated(first: Sequence[float], again: Sequence[float], what: str) -> None:
    """Check that the teacher's scores of a row are the same as before.

    Raises:
        LivenessError: the scores differ by more than the precision of 16-bit servers explains.
    """
    pairs = zip_longest(first, again, fillvalue=math.inf)
    apart = [min(abs(one - other), MOST_APART) if one != other else 0.0 for one, other in pairs]
    mean, allowed = math.fsum(apart) / len(apart), APART + APART_ALONE / math.sqrt(len(apart))
    if not mean <= allowed:
        raise LivenessError(
            f"opd: {what}: its {len(apart)} log-probs differ by {mean:.2g} nats on average (allowed: {allowed:.2g}). "
            "The teacher serves different weights than before, mixes up rows of a request, or its servers differ "
            "from each other."
        )


def summarize_reports(reports: Sequence[OpdReport], coef: float, epochs: int = 1) -> Mapping[str, float]:
    """Compute the workers' metrics of one update; means are NaN if no token was scored.

    Args:
        epochs: number of times that the loss received each row; a row counts once.
    """
    tokens = sum(report.tokens for report in reports)
    own, others = sum(report.teacher_pull for report in reports), sum(report.policy_pull for report in reports)

    def share(part: float, whole: float) -> float:
        return part / whole if whole else math.nan

    return {
        "opd/kd_coef": coef,
        "opd/num_eligible_samples": sum(len(report.hashes or ()) for report in reports) / epochs,
        "opd/k1": share(sum(report.k1 for report in reports), tokens),
        "opd/kl_loss": share(sum(report.k2 for report in reports), tokens),
        "opd/frac_tokens_with_kd": share(tokens, sum(report.response_tokens for report in reports)),
        "opd/rejected_share": share(tokens - sum(report.kept for report in reports), tokens),
        "opd/share_of_loss": share(own, own + others),
        "opd/live/error": max((report.error for report in reports), default=0.0),
    }
