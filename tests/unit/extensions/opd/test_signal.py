"""K1 as an advantage and K2 as a loss: by hand, by enumeration, and compared with each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recipe.offpolicy.extensions.opd.distillation import build_alignment, check_repeated, check_teacher
from recipe.offpolicy.extensions.opd.signal import (
    OpdReport,
    advantages,
    check_reports,
    compute_gaps,
    eligible,
    find_passed,
    k2_loss,
    summarize_reports,
)
from recipe.offpolicy.proof.token_alignment import AlignmentError, tally_agreements
from recipe.offpolicy.proof.verify import LivenessError

ON = torch.tensor([[False, True, True], [False, False, False]])
BASE = torch.tensor([[0.5, 0.25, -0.75], [1.5, -2.5, 0.125]])
STUDENT = torch.tensor([[-1.0, -1.0, -3.0], [-1.0, -1.0, -1.0]])
TEACHER = torch.tensor([[math.nan, -2.0, -0.5], [math.nan] * 3])


def test_advantages_by_hand() -> None:
    """Gaps of 1 and -2.5: coef (t - s); other advantages are bitwise unchanged."""
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=2.0, max_gap=2.0, scale="none")
    assert found.tolist() == [[0.5, -2.0, 4.0], [1.5, -2.5, 0.125]]
    halved = advantages(BASE, STUDENT, TEACHER, ON, coef=2.0, max_gap=2.0, scale=2.0)
    assert halved.tolist() == [[0.5, -1.0, 2.0], [1.5, -2.5, 0.125]]


def test_the_scale_is_the_root_mean_square_of_the_bounded_gaps() -> None:
    """For gaps of 1 and -2: sqrt((1 + 4) / 2) = sqrt(2.5). For 2 and 2.002, each scaled gap is about 1, not 1414
    deviations.
    """
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=1.0, max_gap=2.0, scale="std")
    assert found[0].tolist() == pytest.approx([0.5, -1.0 / math.sqrt(2.5), 2.0 / math.sqrt(2.5)])
    apart = torch.tensor([[0.0, 2.0, 2.002], [0.0, 0.0, 0.0]])
    liked_less = advantages(BASE, STUDENT, STUDENT - apart, ON, coef=1.0, max_gap=5.0, scale="std")
    assert liked_less[0].tolist() == pytest.approx([0.5, -0.9995, -1.0005], abs=1e-6)
    rounded = advantages(BASE, STUDENT, STUDENT - apart * 1e-7, ON, coef=1.0, max_gap=5.0, scale="std")
    assert rounded[0].tolist() == pytest.approx([0.5, -2e-7, -2e-7], abs=1e-7)  # rounding: not scaled


def test_the_published_normalisation_subtracts_the_mean_first() -> None:
    """Gaps of 1 and -2: mean -0.5, deviations 1.5 and -1.5, spread 1.5 sqrt(2). Equal gaps become 0."""
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=2.0, max_gap=2.0, scale="mean_std")
    assert found[0].tolist() == pytest.approx([0.5, -math.sqrt(2), math.sqrt(2)])
    alike = advantages(BASE, STUDENT, STUDENT - 2.0, ON, coef=2.0, max_gap=5.0, scale="mean_std")
    assert alike.tolist() == [[0.5, 0.0, 0.0], [1.5, -2.5, 0.125]]


def test_a_token_that_the_teacher_excludes_counts_as_the_bound() -> None:
    teacher = torch.tensor([[math.nan, -math.inf, -3.0], [math.nan] * 3])
    assert compute_gaps(STUDENT, teacher, ON, max_gap=4.0).tolist() == [[0.0, 4.0, 0.0], [0.0] * 3]
    assert k2_loss(STUDENT, teacher, ON, max_gap=4.0).tolist() == [[0.0, 8.0, 0.0], [0.0] * 3]


def test_k2_by_hand_with_a_bound_that_is_linear_beyond() -> None:
    """Gaps of 1 and -2.5 with a bound of 2: 1/2, and 2 (2.5 - 1)."""
    assert k2_loss(STUDENT, TEACHER, ON, max_gap=2.0).tolist() == [[0.0, 0.5, 3.0], [0.0] * 3]
    with pytest.raises(ValueError, match="token 0 of row 0 is not a number"):
        k2_loss(STUDENT, TEACHER, ~ON, max_gap=2.0)


# Which rollouts are distilled


ONE_OF_EIGHT = torch.tensor([0.0] * 7 + [1.0])


def test_failed_rollouts_of_hard_prompts() -> None:
    rewards = torch.cat([torch.zeros(8), ONE_OF_EIGHT, torch.tensor([0.0, 1.0])])
    groups = ["none"] * 8 + ["one"] * 8 + ["half"] * 2
    found = eligible(rewards, groups, passed_above=0.0, max_pass_rate=0.125)
    assert found.tolist() == [True] * 8 + [True] * 7 + [False] + [False, False]
    assert eligible(rewards, groups, passed_above=0.0, max_pass_rate=0.0).sum() == 8
    assert eligible(rewards, groups, passed_above=0.0, max_pass_rate=0.125, rows="all").sum() == 16


def test_a_reward_at_the_threshold_does_not_pass_in_float32_either() -> None:
    """In float32, 0.3 is 0.30000001."""
    rewards = torch.tensor([0.3, 0.4]).double()
    assert find_passed(rewards, 0.3).tolist() == [False, True]
    assert eligible(rewards, ["a", "a"], passed_above=0.3, max_pass_rate=0.5).tolist() == [True, False]


# What reports of the workers prove, and what is made of them


ONE = OpdReport((11,), tokens=3, response_tokens=5, kept=2, k1=1.5, k2=3.0, teacher_pull=1.0, policy_pull=4.0)
TWO = OpdReport((22, 33), tokens=1, response_tokens=3, kept=1, k1=-0.5, k2=1.0, teacher_pull=1.0, policy_pull=2.0)


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
    with pytest.raises(LivenessError, match=f"the gradient does not depend on the teacher .* error is {error:.2g}"):
        check_reports([ONE, replace(TWO, error=error)], "loss")


def student_and_teacher(noise: float = 0.5, rows: int = 64, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """A student, a teacher whose log-probs are the student's with noise, and a mask of rows of 1 to 24 tokens."""
    generator = torch.Generator().manual_seed(seed)
    student = -3 * torch.rand(rows, 24, generator=generator)
    teacher = (student + noise * torch.randn(student.shape, generator=generator)).clamp(max=0)
    lengths = torch.randint(1, 25, (rows, 1), generator=generator)
    return student, teacher, torch.arange(24) < lengths


FAULTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "zeros": (lambda s, t: torch.zeros_like(t), "64 of 64 sequences contain only zeros"),
    "one value": (lambda s, t: torch.full_like(t, -1.5), "all [0-9]+ values are the placeholder -1.5"),
    "not a number": (lambda s, t: torch.full_like(t, math.nan), "are not finite"),
    "above 0": (lambda s, t: t + 0.3, "are not log-probs: the maximum is"),
    "the student, sent as text": (lambda s, t: s * (1 + 1e-7), "equal log pi_old, so the teacher"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_teachers_opinion_stops_at_once(name: str) -> None:
    student, teacher, scored = student_and_teacher()
    check_teacher(student, teacher, scored)
    fault, said = FAULTS[name]
    with pytest.raises(LivenessError, match=f"(the teacher's log-probs|opd).*{said}"):
        check_teacher(student, fault(student, teacher), scored)


def test_a_row_that_is_scored_again_has_to_get_the_same_answer() -> None:
    first = [-0.1, -2.0, -7.0, -math.inf]
    check_repeated(first, first, "row 1")
    check_repeated(first, [-0.15, -2.06, -7.2, -math.inf], "row 1")  # 0.0775 on average
    check_repeated([-12.0], [-12.25], "row 1")
    with pytest.raises(LivenessError, match=r"row 1: its 4 log-probs differ by 0.35 nats on average .allowed: 0.25"):
        check_repeated(first, [-0.1, -2.3, -8.1, -math.inf], "row 1")
    with pytest.raises(LivenessError, match=r"differ by 1\.2 nats"):
        check_repeated(first, [*first[:3], -3.0], "row 1")


def test_a_teacher_of_other_tokens_stops_once_there_are_rows_enough() -> None:
    """A useful one does not, nor one that may be unrelated."""

    def judge(fault: Callable[[Tensor], Tensor], *, allow_unrelated: bool = False) -> None:
        checker = build_alignment(allow_unrelated=allow_unrelated)
        torch.manual_seed(99)
        for update in range(24):
            student, teacher, scored = student_and_teacher(noise=3.0, seed=update)
            checker.judge(tally_agreements(student, fault(teacher), scored))

    def draw(teacher: Tensor) -> Tensor:
        return -3 * torch.rand(teacher.shape)

    judge(lambda teacher: teacher)
    judge(draw, allow_unrelated=True)
    with pytest.raises(AlignmentError, match="the teacher's log-probs belong to other sequences"):
        judge(draw)
