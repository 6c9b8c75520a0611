"""Proof of on-policy distillation: what the loss saw is what the teacher said, and it acts as configured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...proof.token_alignment import KINDS, AlignmentTally, PairCounts, find_shift
from ...proof.verify import LivenessError
from .opd_worker import OpdReport

TOLERANCE = {"loss": 1e-3, "advantage": 1e-4}
"""Greatest relative error of a gradient, and of an advantage, in float32."""
CLEAR = 0.5
"""Least concordance with the token beside that counts."""


def check_reports(reports: Sequence[OpdReport], mode: str) -> None:
    """Check the reports of one update.

    Raises:
        LivenessError: the term does not act.
    """
    # Written so that NaN fails.
    if wrong := [report.error for report in reports if not report.error <= TOLERANCE[mode]]:
        what = (
            "the gradient does not follow the teacher as that of (s - t)^2 / 2 does"
            if mode == "loss"
            else "the advantages in the loss are not coef (t - s) / scale"
        )
        raise LivenessError(
            f"opd: {what}: a relative error of {wrong[0]:.2g}. Another term or estimator took its place."
        )


def check_alignment(agreements: AlignmentTally) -> None:
    """Check, over all rows so far, that the teacher's log-probs are not those of the token beside.

    A far teacher may disagree with the student about every token of failed rows; it does not agree about the next one.

    Raises:
        LivenessError: they are off by one token.
    """
    for kind in KINDS:
        count: PairCounts = getattr(agreements, kind)
        lag = find_shift(count)
        if lag and count.concordance(lag) > CLEAR:
            raise LivenessError(
                f"opd: the teacher's log-probs are off by one token: in {max(count.pairs)} pairs of {kind} they agree "
                f"with the student's by {count.concordance():.2f}, and by {count.concordance(lag):.2f} with those of "
                f"the token {'after' if lag == 1 else 'before'} (1 is always, 0 by chance)."
            )


def summarize_reports(reports: Sequence[OpdReport], coef: float) -> Mapping[str, float]:
    """Compute the workers' metrics of one update; means are NaN where no token was scored."""
    tokens = sum(report.tokens for report in reports)
    own, others = sum(report.teacher_pull for report in reports), sum(report.policy_pull for report in reports)

    def share(part: float, whole: float) -> float:
        return part / whole if whole else math.nan

    return {
        "opd/kd_coef": coef,
        "opd/num_eligible_samples": float(sum(len(report.hashes or ()) for report in reports)),
        "opd/k1": share(sum(report.k1 for report in reports), tokens),
        "opd/kl_loss": share(sum(report.k2 for report in reports), tokens),
        "opd/frac_tokens_with_kd": share(tokens, sum(report.response_tokens for report in reports)),
        "opd/rejected_share": share(tokens - sum(report.kept for report in reports), tokens),
        "opd/share_of_loss": share(own, own + others),
        "opd/live/error": max((report.error for report in reports), default=0.0),
    }
