"""K1 as an advantage, K2 as a loss: by hand, by enumeration, and against each other."""

from __future__ import annotations

import itertools
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


@given(st.lists(st.tuples(*[st.floats(-9, 0, allow_subnormal=False)] * 2), min_size=1, max_size=6))
def test_the_sign_of_an_advantage_is_that_of_the_teachers_opinion(pairs: list[tuple[float, float]]) -> None:
    student, teacher = (torch.tensor([side], dtype=torch.float64) for side in zip(*pairs, strict=True))
    every = torch.ones_like(student, dtype=torch.bool)
    found = advantages(torch.zeros_like(student), student, teacher, every, coef=1.0, max_gap=5.0, scale="std")
    assert torch.equal(found.sign(), (teacher - student).sign())


SIZE, LENGTH = 5, 3


def paths() -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(SIZE), repeat=LENGTH)))


class Tabular:
    """A policy over a small vocabulary: a logit for each prefix and token."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [SIZE**depth for depth in range(LENGTH)]
        self.logits = [
            torch.randn(size, SIZE, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes
        ]

    def log_probs(self, rows: torch.Tensor) -> torch.Tensor:
        prefix = torch.zeros(len(rows), dtype=torch.int64)
        found = []
        for depth, logits in enumerate(self.logits):
            found.append(logits.log_softmax(-1)[prefix, rows[:, depth]])
            prefix = prefix * SIZE + rows[:, depth]
        return torch.stack(found, dim=1)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, self.logits, retain_graph=True)])


def exact_gradient(student: Tabular, teacher: Tabular) -> torch.Tensor:
    """Gradient of each token's reverse KL at prefixes of the student's, which themselves are held fixed."""
    rows = paths()
    reached = student.log_probs(rows).detach()
    total = torch.zeros((), dtype=torch.float64)
    prefix = torch.zeros(len(rows), dtype=torch.int64)
    for depth in range(LENGTH):
        s, t = student.logits[depth].log_softmax(-1)[prefix], teacher.logits[depth].log_softmax(-1)[prefix].detach()
        # Each prefix stands once for all its continuations.
        weight = reached[:, :depth].sum(-1).exp() / SIZE ** (LENGTH - depth)
        total = total + (weight * (s.exp() * (s - t)).sum(-1)).sum()
        prefix = prefix * SIZE + rows[:, depth]
    return student.gradient(total)


def test_both_signals_have_the_reverse_kl_gradient_in_expectation() -> None:
    """By enumeration of all sequences; under samples of mu with the weight by token it has, and without it not."""
    student, teacher, mu = Tabular(1), Tabular(2), Tabular(3)
    rows, exact = paths(), exact_gradient(student, teacher)
    s, t, m = student.log_probs(rows), teacher.log_probs(rows).detach(), mu.log_probs(rows).detach()
    every = torch.ones_like(s, dtype=torch.bool)
    k2 = k2_loss(s, t, every, max_gap=1e3)
    taught = advantages(torch.zeros_like(t), s, t, every, coef=1.0, max_gap=1e3, scale="none")

    def error(loss: torch.Tensor) -> float:
        return float((student.gradient(loss) - exact).abs().max())

    own = s.detach().sum(-1, keepdim=True).exp()
    assert error((own * k2).sum()) < 1e-12
    assert error((own * -taught * s).sum()) < 1e-12
    # The prefix is sampled by mu as well, so that the weight of a token is that of all tokens up to it.
    of_mu, weight = m.sum(-1, keepdim=True).exp(), (s.detach() - m).cumsum(-1).exp()
    k2, again = k2_loss(student.log_probs(rows), t, every, max_gap=1e3), student.log_probs(rows)
    assert error((of_mu * weight * k2).sum()) < 1e-12
    assert error((of_mu * -taught * again).sum()) > 1e-2
