"""What reports of the workers prove, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recipe.offpolicy.extensions.opd.evidence import (
    build_alignment,
    check_repeated,
    check_reports,
    check_teacher,
    summarize_reports,
)
from recipe.offpolicy.extensions.opd.opd_worker import OpdReport
from recipe.offpolicy.extensions.opd.signal import describe_missing, find_scored
from recipe.offpolicy.proof.token_alignment import AlignmentChecker, AlignmentError, tally_agreements
from recipe.offpolicy.proof.verify import LivenessError
from tests.support.examples import at_most

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


def student_and_teacher(noise: float = 0.5, rows: int = 64, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A student, a teacher whose log-probs are the student's with noise, and a mask of rows of 1 to 24 tokens."""
    generator = torch.Generator().manual_seed(seed)
    student = -3 * torch.rand(rows, 24, generator=generator)
    teacher = (student + noise * torch.randn(student.shape, generator=generator)).clamp(max=0)
    lengths = torch.randint(1, 25, (rows, 1), generator=generator)
    return student, teacher, torch.arange(24) < lengths


FAULTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "zeros": (lambda s, t: torch.zeros_like(t), "64 of 64 sequences hold only zeros"),
    "some rows zeros": (lambda s, t: t * (torch.arange(64) > 8)[:, None], "sequences hold only zeros"),
    "one value": (lambda s, t: torch.full_like(t, -1.5), "all [0-9]+ values are the placeholder -1.5"),
    "not finite": (lambda s, t: torch.where(torch.rand(t.shape) < 0.7, -math.inf, t), "are not finite"),
    "not a number": (lambda s, t: torch.full_like(t, math.nan), "are not finite"),
    "negated": (lambda s, t: -t, "hold no log-probs: the maximum is"),
    "above 0": (lambda s, t: t + 0.3, "hold no log-probs: the maximum is"),
    "the student": (lambda s, t: s, "are log pi_old itself"),
    "the student, sent as text": (lambda s, t: s * (1 + 1e-7), "are log pi_old itself"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_teachers_opinion_stops_at_once(name: str) -> None:
    student, teacher, scored = student_and_teacher()
    check_teacher(student, teacher, scored)
    fault, said = FAULTS[name]
    with pytest.raises(LivenessError, match=f"(the teacher's log-probs|opd).*{said}"):
        check_teacher(student, fault(student, teacher), scored)


@settings(max_examples=at_most(100))
@given(st.sampled_from([1e-3, 0.02, 0.5, 3.0]), st.integers(1, 64), st.booleans(), st.integers(0, 2**31))
def test_a_good_teacher_passes_however_near_the_student_and_in_16_bits(
    noise: float, rows: int, in_16_bits: bool, seed: int
) -> None:
    """Rows of one token among them; log-probs of 16 bits are equal in many places."""
    student, teacher, scored = student_and_teacher(noise, rows, seed)
    teacher = teacher.bfloat16().float() if in_16_bits else teacher
    check_teacher(student, teacher, scored)
    checker = build_alignment(allow_unrelated=False)
    for _ in range(8):
        checker.judge(tally_agreements(student, teacher, scored))


RELATED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "rows permuted": (lambda s, t: t.roll(5, 0), "belong to other sequences"),
    "random": (lambda s, t: -3 * torch.rand(t.shape), "belong to other sequences"),
    "negated about its mean": (lambda s, t: -3 - t, "belong to other sequences"),
    "a token late": (lambda s, t: t.roll(1, 1), "are off by one token: .* of the token after"),
    "a token early": (lambda s, t: t.roll(-1, 1), "are off by one token: .* of the token before"),
}


@pytest.mark.parametrize("name", RELATED)
def test_what_is_said_of_other_tokens_stops_once_there_are_rows_enough(name: str) -> None:
    torch.manual_seed(99)
    fault, said = RELATED[name]
    checker = build_alignment(allow_unrelated=False)
    with pytest.raises(AlignmentError, match=f"the teacher's log-probs {said}"):
        judge_updates(checker, fault)
    judge_updates(build_alignment(allow_unrelated=True), fault)


def judge_updates(checker: AlignmentChecker, fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    for update in range(24):
        student, teacher, scored = student_and_teacher(seed=update)
        checker.judge(tally_agreements(student, fault(student, teacher), scored))


def test_a_teacher_that_disagrees_about_most_tokens_of_failed_rows_passes() -> None:
    """A concordance of 0.17, as a teacher had that improved its student: s and t share a fifth of their variance."""
    generator, checker, seen = torch.Generator().manual_seed(0), build_alignment(allow_unrelated=False), []
    for _ in range(200):
        own, common = (torch.randn(64, 6, generator=generator) for _ in range(2))
        student = -2 - common
        teacher = -2 - 0.23 * common - 0.973 * own
        found = checker.judge(tally_agreements(student, teacher, torch.ones(64, 6, dtype=torch.bool)))
        seen += [found["concordance_rows"]] if "concordance_rows" in found else []
    assert sum(seen) / len(seen) == pytest.approx(0.17, abs=0.02)


def test_a_row_that_is_scored_again_has_to_get_the_same_answer() -> None:
    first = [-0.1, -2.0, -7.0, -math.inf]
    check_repeated(first, first, "row 1")
    check_repeated(first, [-0.15, -2.06, -7.2, -math.inf], "row 1")  # 0.0775 on average
    check_repeated([-12.0], [-12.25], "row 1")
    with pytest.raises(LivenessError, match=r"row 1: its 4 log-probs differ by 0.35 nats on average .allowed: 0.25"):
        check_repeated(first, [-0.1, -2.3, -8.1, -math.inf], "row 1")
    with pytest.raises(LivenessError, match=r"differ by 1\.2 nats"):
        check_repeated(first, [*first[:3], -3.0], "row 1")


def test_a_lost_column_is_said_with_those_that_arrived() -> None:
    assert "offpolicy_opd_teacher did not reach the loss (there: a, b)" in describe_missing(["a", "b"])
    assert "(there: none of its columns)" in describe_missing([])
