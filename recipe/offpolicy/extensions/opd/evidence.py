"""Proof of on-policy distillation: the loss received the teacher's values, and they act as configured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from torch import Tensor

from ...proof.rollout_log_probs import LEAST_TOKENS, UNSURE, Column, check_arrived, check_zeros
from ...proof.token_alignment import AlignmentChecker
from ...proof.verify import LivenessError
from .opd_worker import OpdReport

TOLERANCE = {"loss": 1e-3, "advantage": 1e-4}
"""Largest accepted relative error of a gradient, and of an advantage, in float32."""
COLUMN = Column("the teacher's log-probs", "Check the log of the server in opd.teacher.url.", LivenessError)
ROUNDING = 2.0**-22
"""Relative difference of log-probs up to which two are the same number in float32."""
APART, APART_ALONE, MOST_APART = 0.1, 0.3, 5.0
"""In nats: the limit of the mean difference between two scores of a long row, the amount added for a single token, and
the cap on one token's difference."""


def check_reports(reports: Sequence[OpdReport], mode: str) -> None:
    """Check the reports of one update.

    Raises:
        LivenessError: the distillation term does not act.
    """
    # This form also fails for NaN.
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
    """Check by their values that the teacher's scores can be log-probs of a policy other than the student.

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
            f"opd: the teacher's log-probs of {int(scored.sum())} tokens are log pi_old itself: the teacher is the "
            f"student, and teaches nothing. Fix: set opd.teacher.url to the teacher's server."
        )


def _compute_unrelated_limit(rows: int) -> float:
    """Compute the concordance below which scores of this many rows carry no information about their tokens.

    By chance the concordance is 0, with a standard deviation of about 0.7 / sqrt(rows). A teacher may disagree about
    most tokens of failed rows: a teacher that improved its student had a concordance of 0.17 on such rows.
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
    """Check that the teacher gives a row the same scores as before.

    Raises:
        LivenessError: the scores differ by more than the precision of 16-bit servers explains.
    """
    pairs = zip_longest(first, again, fillvalue=math.inf)
    apart = [min(abs(one - other), MOST_APART) if one != other else 0.0 for one, other in pairs]
    mean, allowed = math.fsum(apart) / len(apart), APART + APART_ALONE / math.sqrt(len(apart))
    if not mean <= allowed:
        raise LivenessError(
            f"opd: {what}: its {len(apart)} log-probs differ by {mean:.2g} nats on average (allowed: {allowed:.2g}). "
            "The teacher serves other weights than before, mixes up rows of a request, or its servers differ from "
            "each other."
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
