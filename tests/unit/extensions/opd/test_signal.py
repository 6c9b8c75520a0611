"""K1 as an advantage, K2 as a loss: by hand, by enumeration, and against each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe.offpolicy.extensions.opd import advantages, k2_loss
from recipe.offpolicy.extensions.opd.signal import compute_factor, compute_gaps, compute_scale, find_horizon

ON = torch.tensor([[False, True, True], [False, False, False]])
BASE = torch.tensor([[0.5, 0.25, -0.75], [1.5, -2.5, 0.125]])
STUDENT = torch.tensor([[-1.0, -1.0, -3.0], [-1.0, -1.0, -1.0]])
TEACHER = torch.tensor([[math.nan, -2.0, -0.5], [math.nan] * 3])


def test_advantages_by_hand() -> None:
    """Gaps of 1 and -2.5: coef (t - s), and the others to the bit."""
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=2.0, max_gap=2.0, scale="none")
    assert found.tolist() == [[0.5, -2.0, 4.0], [1.5, -2.5, 0.125]]
    halved = advantages(BASE, STUDENT, TEACHER, ON, coef=2.0, max_gap=2.0, scale=2.0)
    assert halved.tolist() == [[0.5, -1.0, 2.0], [1.5, -2.5, 0.125]]


def test_the_scale_is_the_root_mean_square_of_the_bounded_gaps() -> None:
    """Of 1 and -2: sqrt((1 + 4) / 2) = sqrt(2.5). Of 2 and 2.002 each gap is about 1, not 1414 of their deviation."""
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=1.0, max_gap=2.0, scale="std")
    assert found[0].tolist() == pytest.approx([0.5, -1.0 / math.sqrt(2.5), 2.0 / math.sqrt(2.5)])
    apart = torch.tensor([[0.0, 2.0, 2.002], [0.0, 0.0, 0.0]])
    liked_less = advantages(BASE, STUDENT, STUDENT - apart, ON, coef=1.0, max_gap=5.0, scale="std")
    assert liked_less[0].tolist() == pytest.approx([0.5, -0.9995, -1.0005], abs=1e-6)
    rounded = advantages(BASE, STUDENT, STUDENT - apart * 1e-7, ON, coef=1.0, max_gap=5.0, scale="std")
    assert rounded[0].tolist() == pytest.approx([0.5, -2e-7, -2e-7], abs=1e-7)  # rounding: not scaled


def test_the_published_normalisation_subtracts_the_mean_first() -> None:
    """Gaps of 1 and -2: mean -0.5, deviations 1.5 and -1.5, spread 1.5 sqrt(2). Of equal gaps nothing is left."""
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=2.0, max_gap=2.0, scale="mean_std")
    assert found[0].tolist() == pytest.approx([0.5, -math.sqrt(2), math.sqrt(2)])
    alike = advantages(BASE, STUDENT, STUDENT - 2.0, ON, coef=2.0, max_gap=5.0, scale="mean_std")
    assert alike.tolist() == [[0.5, 0.0, 0.0], [1.5, -2.5, 0.125]]


@pytest.mark.parametrize(
    ("value", "plan", "wanted"),
    [
        (0, {"start": 10, "end": 20, "final": 0.0}, 1.0),
        (15, {"start": 10, "end": 20, "final": 0.0}, 0.5),
        (25, {"start": 10, "end": 20, "final": 0.0}, 0.0),
        (0.75, {"start": 0.5, "end": 1.0, "final": 0.2}, 0.6),
        (1.25, {"start": 2.0, "end": 1.0, "final": 3.0}, 2.5),
    ],
)
def test_a_scheduled_factor_by_hand(value: float, plan: dict[str, float], wanted: float) -> None:
    assert compute_factor(value, **plan) == pytest.approx(wanted)


def test_tokens_beyond_the_horizon_get_0_and_are_in_no_statistic() -> None:
    found = advantages(BASE, STUDENT, TEACHER, ON, coef=1.0, max_gap=9.0, scale="std", horizon=1)
    assert found[0].tolist() == [0.5, -1.0, 0.0]
    assert find_horizon(torch.tensor([[True, False, True, True]]), 2).tolist() == [[True, False, True, False]]


def test_a_token_that_the_teacher_excludes_counts_as_the_bound() -> None:
    teacher = torch.tensor([[math.nan, -math.inf, -3.0], [math.nan] * 3])
    assert compute_gaps(STUDENT, teacher, ON, max_gap=4.0).tolist() == [[0.0, 4.0, 0.0], [0.0] * 3]
    assert k2_loss(STUDENT, teacher, ON, max_gap=4.0).tolist() == [[0.0, 8.0, 0.0], [0.0] * 3]


def test_nothing_that_was_not_scored_is_trained_on() -> None:
    for wanted in (lambda: k2_loss(STUDENT, TEACHER, ~ON, max_gap=1.0), lambda: compute_scale(BASE, ON, "mean")):
        with pytest.raises(ValueError, match=r"token 0 of row 0|scale=mean"):
            wanted()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coef": math.nan}, "coef=nan: not a finite number"),
        ({"max_gap": 0.0}, "max_gap=0.0: not a finite number of nats above 0"),
        ({"max_gap": math.inf}, "max_gap=inf"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"horizon": 0}, "horizon=0: expected 1 or more"),
        ({"teacher": TEACHER[:1]}, "shapes .*expected one shape"),
        ({"base": BASE[:, :2]}, r"\(2, 2\) advantages for a mask of \(2, 3\)"),
    ],
)
def test_bad_input_of_advantages(changes: dict[str, Any], said: str) -> None:
    given = {"base": BASE, "student": STUDENT, "teacher": TEACHER, "eligible_tokens": ON}
    with pytest.raises(ValueError, match=said):
        advantages(**(given | {"coef": 1.0, "max_gap": 2.0, "scale": "none"} | changes))


@pytest.mark.parametrize(("mask", "bound", "said"), [(ON[0], 1.0, "expected one shape"), (ON, -1.0, "max_gap=-1.0")])
def test_bad_input_of_k2(mask: torch.Tensor, bound: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        k2_loss(STUDENT, TEACHER, mask, max_gap=bound)


def test_k2_by_hand_with_a_bound_that_is_linear_beyond() -> None:
    """Gaps of 1 and -2.5 at a bound of 2: 1/2, and 2 (2.5 - 1)."""
    assert k2_loss(STUDENT, TEACHER, ON, max_gap=2.0).tolist() == [[0.0, 0.5, 3.0], [0.0] * 3]


@given(st.floats(-12, 0), st.floats(-12, 0), st.floats(0.5, 8))
def test_the_slope_of_k2_is_the_bounded_gap(student: float, teacher: float, bound: float) -> None:
    leaf = torch.tensor([[student]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[teacher]], dtype=torch.float64, requires_grad=True)
    k2_loss(leaf, t, torch.tensor([[True]]), max_gap=bound).sum().backward()
    assert float(leaf.grad) == pytest.approx(min(max(student - teacher, -bound), bound), abs=1e-12)  # type: ignore[arg-type]
    assert t.grad is None
