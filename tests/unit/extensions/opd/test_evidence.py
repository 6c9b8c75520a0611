"""What reports of the workers prove, and what is made of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from recipe.offpolicy.extensions.opd.columns import describe_missing, find_scored
from recipe.offpolicy.extensions.opd.evidence import check_alignment, check_reports, summarize_reports
from recipe.offpolicy.extensions.opd.opd_worker import OpdReport
from recipe.offpolicy.proof.token_alignment import AlignmentTally, tally_agreements
from recipe.offpolicy.proof.verify import LivenessError

ONE = OpdReport((11,), tokens=3, response_tokens=5, kept=2, k1=1.5, k2=3.0, teacher_pull=1.0, policy_pull=4.0)
TWO = OpdReport((22, 33), tokens=1, response_tokens=3, kept=1, k1=-0.5, k2=1.0, teacher_pull=1.0, policy_pull=2.0)


def test_scored_tokens_are_those_of_eligible_rows_that_have_a_log_prob() -> None:
    teacher = torch.tensor([[-1.0, math.nan, -2.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert find_scored(teacher, torch.tensor([1, 0], dtype=torch.int8), mask).tolist() == [
        [True, False, False],
        [False] * 3,
    ]


def test_sums_add_up_over_micro_batches_and_ranks() -> None:
    found = summarize_reports([ONE, TWO], 0.5)
    assert found == {
        "opd/kd_coef": 0.5,
        "opd/num_eligible_samples": 3.0,
        "opd/frac_tokens_with_kd": 0.5,  # 4 of the 8 tokens that the workers saw
        "opd/k1": 0.25,
        "opd/kl_loss": 1.0,
        "opd/rejected_share": 0.25,
        "opd/share_of_loss": 0.25,
        "opd/live/error": 0.0,
    }
    nothing = summarize_reports([OpdReport()], 0.5)
    assert nothing.keys() == found.keys()
    assert math.isnan(nothing["opd/k1"])


@pytest.mark.parametrize("error", [0.5, math.nan])
def test_a_term_that_does_not_act_stops(error: float) -> None:
    check_reports([ONE, TWO], "loss")
    with pytest.raises(LivenessError, match=f"the gradient does not follow the teacher .* error of {error:.2g}"):
        check_reports([ONE, replace(TWO, error=error)], "loss")


def agreements(shift: int, noise: float) -> AlignmentTally:
    """Of a student and a teacher whose log-probs are the student's, moved by ``shift`` tokens, with noise."""
    generator = torch.Generator().manual_seed(1)
    student = -3 * torch.rand(64, 24, generator=generator)
    teacher = student.roll(shift, 1) + noise * torch.randn(student.shape, generator=generator)
    return tally_agreements(student, teacher, torch.ones_like(student, dtype=torch.bool))


def test_a_teacher_that_is_off_by_one_token_stops_and_one_that_disagrees_does_not() -> None:
    check_alignment(AlignmentTally())
    check_alignment(agreements(0, 0.5))
    check_alignment(agreements(7, 0.5))
    for shift, side in ((1, "after"), (-1, "before")):
        with pytest.raises(LivenessError, match=f"off by one token: .* of the token {side}"):
            check_alignment(agreements(shift, 0.5))


def test_a_lost_column_is_said_with_those_that_arrived() -> None:
    assert "offpolicy_opd_teacher did not reach the loss (there: a, b)" in describe_missing(["a", "b"])
    assert "(there: none of its columns)" in describe_missing([])
